"""Epsilon is what dp-accounting says, for the cohorts that are really drawn; and a budget ends a run in time."""

import builtins
import json
import math
from collections import Counter

import dp_accounting
import pytest
import torch
from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
from dp_accounting.rdp import RdpAccountant

import sparing
from reference import dp as reference
from sparing.core.errors import ConfigError
from sparing.core.method import Privacy
from sparing.fleet.fleet import Fleet
from sparing.runs.privacy import accountant
from sparing.runs.privacy.accountant import epsilon_of_cohorts, open_privacy_account
from sparing.runs.privacy.releases import Releases

DELTA = 1e-4


def direct(event, times, delta=DELTA):
    return RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE).compose(event, times).get_epsilon(delta)


@pytest.mark.parametrize(
    ("noise", "pool", "n", "rounds"), [(2.0, 1000, 20, 50), (4.0, 200, 10, 200), (8.0, 1000, 100, 7), (3.0, 40, 1, 1)]
)
def test_it_agrees_with_dp_accounting_called_directly(noise, pool, n, rounds):
    event = SampledWithoutReplacementDpEvent(pool, n, GaussianDpEvent(noise / 2))
    assert epsilon_of_cohorts(noise, Counter({(pool, n): rounds}), DELTA) == direct(event, rounds)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (2.0, 30), (10.0, 100)])
def test_without_sampling_it_is_the_gaussian_mechanism(noise, rounds):
    got = epsilon_of_cohorts(noise, Counter({(7, 7): rounds}), DELTA)
    assert got == direct(GaussianDpEvent(noise / 2), rounds)
    orders = [a for a in accountant._accounting_library().DEFAULT_RDP_ORDERS if a > 1.01]
    assert got == pytest.approx(reference.gaussian_epsilon(noise, rounds, DELTA, orders), rel=1e-9)


def test_sampling_never_makes_it_worse_and_more_of_anything_costs_more():
    for noise in (1.0, 4.0):
        whole = epsilon_of_cohorts(noise, Counter({(20, 20): 20}), DELTA)
        some = [epsilon_of_cohorts(noise, Counter({(20, n): 20}), DELTA) for n in (1, 5, 10, 19)]
        assert some == sorted(some)
        assert some[-1] <= whole
        event = SampledWithoutReplacementDpEvent(20, 10, GaussianDpEvent(noise / 2))
        assert some[2] <= min(whole, direct(event, 20))
    rounds = [epsilon_of_cohorts(2.0, Counter({(100, 5): t}), DELTA) for t in range(1, 40)]
    assert rounds == sorted(rounds)
    assert epsilon_of_cohorts(2.0, Counter({(100, 5): 5, (50, 5): 3}), DELTA) > rounds[7]
    assert epsilon_of_cohorts(2.0, Counter(), DELTA) == 0
    assert epsilon_of_cohorts(0.0, Counter({(9, 3): 1}), DELTA) == math.inf


def test_different_rounds_compose():
    """Rounds in which others were present are composed as dp-accounting composes them."""
    composed = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
    for (pool, n), often in {(100, 5): 5, (60, 5): 3}.items():
        composed.compose(SampledWithoutReplacementDpEvent(pool, n, GaussianDpEvent(2.0)), often)
    assert epsilon_of_cohorts(4.0, Counter({(100, 5): 5, (60, 5): 3}), DELTA) == pytest.approx(
        composed.get_epsilon(DELTA)
    )


def test_the_cohorts_counted_are_those_drawn():
    away = Fleet(available=0.5, held_out=torch.tensor([0, 1]))
    found = dict(zip(range(9), accountant._cohort_history(away, 30, 4, seed=3, releases=Releases()), strict=False))
    for t in range(1, 9):
        pool = int(away.present(3, t, 30).sum())
        assert found[t] - found[t - 1] == Counter({(pool, len(away.cohort(3, t, 30, 4))): 1})
    few = dict(
        zip(
            range(9),
            accountant._cohort_history(Fleet(available=0.05), 20, 4, seed=3, releases=Releases()),
            strict=False,
        )
    )
    assert sum(few[8].values()) < 8  # rounds without anybody cost nothing
    assert all(n <= min(4, pool) for pool, n in few[8])


def test_local_noise_is_counted_for_the_busiest_client_without_sampling():
    fleet, times = Fleet(), torch.zeros(10, dtype=torch.int64)
    spent = open_privacy_account(Privacy(5.0, "local", delta=DELTA), fleet, 10, 3, seed=0, rounds=6).spent
    for t in range(1, 7):
        times[fleet.cohort(0, t, 10, 3)] += 1
        assert spent(t) == direct(GaussianDpEvent(2.5), int(times.max()))
    assert 1 < int(times.max()) < 6


def test_delta_is_by_default_less_than_one_over_the_clients_that_train():
    held = Fleet(held_out=torch.arange(20))
    spent = open_privacy_account(Privacy(2.0), held, 120, 5, seed=0, rounds=3).spent
    assert spent(3) == epsilon_of_cohorts(2.0, Counter({(100, 5): 3}), 100**-1.1)


def test_a_budget_is_used_up_but_never_exceeded():
    for budget in (3.0, 4.0, 5.0, 6.0, 7.0):
        rounds = open_privacy_account(Privacy(2.0, epsilon=budget, delta=DELTA), Fleet(), 100, 10, seed=0, rounds=500)
        assert rounds.spent(rounds.last) <= budget < rounds.spent(rounds.last + 1)
        assert f"round {rounds.last + 1} of 500 would spend" in rounds.why
    enough = open_privacy_account(Privacy(2.0, epsilon=1e6), Fleet(), 100, 10, seed=0, rounds=5)
    assert (enough.last, enough.why) == (5, "")
    with pytest.raises(ConfigError, match=r"dp.epsilon is 0.01, but one round spends .* raise noise"):
        open_privacy_account(Privacy(2.0, epsilon=0.01), Fleet(), 100, 10, seed=0, rounds=5)


STUDY = {"rounds": 9, "sample": 4, "seed": 1, "local": {"steps": 1}, "evaluate": {"every": 9}, "checkpoint": 9}


def test_a_run_ends_early_says_so_and_is_complete(tmp_path):
    method = [{"dp": {"noise": 4.0, "epsilon": 0.8}}]
    result = sparing.run("digits", method, out=tmp_path / "a", **STUDY)
    spent = result.metric("epsilon")
    assert 1 < result.rounds < 9
    assert len(spent) == result.rounds
    assert spent == sorted(spent)
    assert spent[-1] == result.epsilon <= 0.8
    assert spent == [epsilon_of_cohorts(4.0, Counter({(20, 4): t}), 20**-1.1) for t in range(1, result.rounds + 1)]
    assert f"round {result.rounds + 1} of 9 would spend" in result.stopped
    assert result.table[-1].accuracy == result.accuracy == result.best_accuracy  # the last round is evaluated
    assert (tmp_path / "a" / "checkpoint.safetensors").exists()  # and saved
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["epsilon"], summary["stopped"]) == (result.epsilon, result.stopped)
    rows = (tmp_path / "a" / "metrics.csv").read_text().splitlines()
    assert f"{result.rounds},epsilon,{result.epsilon!r}" in rows
    again = sparing.resume(tmp_path / "a")
    assert again.model_sha256 == result.model_sha256
    assert again.summary == result.summary


def test_a_budget_that_pays_for_nothing_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="one round spends"):
        sparing.run("digits", [{"dp": {"epsilon": 0.001}}], out=tmp_path / "a", **STUDY)
    assert not (tmp_path / "a").exists()


def test_other_runs_know_nothing_of_it():
    result = sparing.run("digits", "fedavg", **STUDY | {"rounds": 1})
    assert not {"epsilon", "stopped"} & result.summary.keys()
    assert "epsilon" not in result.table[0].metrics


def test_without_dp_accounting_there_is_one_clear_sentence(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    assert dp_accounting
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match="pip install dp-accounting"):
        epsilon_of_cohorts(1.234, Counter({(5, 5): 1}), DELTA)
