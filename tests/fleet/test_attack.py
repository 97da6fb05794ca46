"""Simulated attackers: who they are, what they say, and that nobody else changes."""

from contextlib import closing

import pytest
import torch
from torch import nn

import sparing
from sparing.core.errors import ConfigError, TrainingError
from sparing.core.method import Lesson
from sparing.fleet.attack import Attack, choose_attackers, with_flipped_labels
from sparing.runs.start import new_run, settle_study
from sparing.runs.study import study_from
from sparing.tasks.build import build_task
from sparing.tasks.task import Task
from support import make_ctx, random_tree, small_layout

LAYOUT = small_layout()
NOBODY = torch.zeros(0, dtype=torch.int64)
TASK = {"data": "digits", "clients": 10, "model": {"mlp": {"hidden": [16]}}}
QUICK = {"rounds": 2, "sample": 6, "seed": 3, "local": {"steps": 3}, "plan": {"path": "loop", "chunk": 4}}


def play(kind, method="median", **options):
    attack = {"kind": kind, "share": 0.3}
    return sparing.run(TASK, method, **{**QUICK, "fleet": {"attack": attack}, **options})


def test_attackers_are_a_fixed_share_chosen_by_the_seed():
    who = choose_attackers(seed=4, clients=50, share=0.2, held_out=NOBODY)
    assert int(who.sum()) == 10
    assert torch.equal(who, choose_attackers(4, 50, 0.2, NOBODY))
    assert not torch.equal(who, choose_attackers(5, 50, 0.2, NOBODY))
    more = choose_attackers(4, 50, 0.4, NOBODY)
    assert bool((more | ~who).all()), "a larger share only adds some"


def test_clients_that_never_train_are_no_attackers():
    held_out = torch.arange(25)
    who = choose_attackers(4, 50, 0.4, held_out)
    assert int(who.sum()) == 10
    assert not bool(who[held_out].any())


def test_nobody_is_no_share():
    with pytest.raises(ConfigError, match=r"fleet.attack.share is 0.01 of 10 clients, which is nobody"):
        play("nan", fleet={"attack": {"kind": "nan", "share": 0.01}})


@pytest.mark.parametrize(("kind", "factor"), [("sign-flip", -4.0), ("scaled", 4.0), ("nan", float("nan"))])
def test_what_attackers_say_and_that_others_keep_every_bit(kind, factor):
    start, after = random_tree(LAYOUT, 1), random_tree(LAYOUT, 5, seed=1)
    who = torch.zeros(50, dtype=torch.bool)
    who[[11, 14]] = True
    ctx = make_ctx([10, 11, 12, 13, 14])
    attack = Attack(kind, who, 4.0)
    said = attack.claim(start, after, ctx)
    for name, x in after.items():
        assert torch.equal(said[name][[0, 2, 3]], x[[0, 2, 3]])
        if x.is_floating_point():
            want = start[name] + factor * (x - start[name])
            assert torch.allclose(said[name][[1, 4]], want[[1, 4]], equal_nan=True)
        else:
            assert torch.equal(said[name], x)
    alone = attack.claim(start, {name: x[1:2] for name, x in after.items()}, ctx.at(slice(1, 2)))
    assert all(torch.equal(alone[name].nan_to_num(7), said[name][1:2].nan_to_num(7)) for name in after)
    assert attack.claim(start, after, make_ctx([10, 12])) is after


def test_labels_are_turned_around_for_attackers_only_and_in_training_only():
    task = build_task("digits", clients=8, split="iid", validation=0.1)
    who = choose_attackers(0, 8, 0.25, NOBODY)
    other = with_flipped_labels(task, who)
    assert int(who.sum()) == 2
    for i in range(8):
        y, z = task.train.client(i)[1], other.train.client(i)[1]
        assert torch.equal(z, 9 - y if bool(who[i]) else y)
    assert other.test is task.test
    assert other.validation is task.validation


def test_only_classes_can_be_flipped():
    x, y = torch.rand(6, 2), torch.rand(6)
    task = Task(nn.Linear(2, 1), train=[(x[:3], y[:3]), (x[3:], y[3:])], test=(x, y))
    with pytest.raises(ConfigError, match="the targets are no classes; use another kind"):
        sparing.run(task, fleet={"attack": {"kind": "label-flip", "share": 0.5}}, **QUICK | {"sample": 2})


@pytest.mark.parametrize("kind", ["label-flip", "sign-flip", "scaled", "nan"])
def test_an_attack_changes_the_run_and_is_resumed(kind, tmp_path):
    class Stop(Exception):
        pass

    def after_two(record):
        if record.round == 2:
            raise Stop

    whole = play(kind, rounds=4)
    with pytest.raises(Stop):
        play(kind, rounds=4, out=tmp_path / "run", loggers=[after_two])
    assert sparing.resume(tmp_path / "run").model_sha256 == whole.model_sha256
    assert whole.model_sha256 != play("none", rounds=4).model_sha256


def test_no_attack_is_the_default():
    plain = sparing.run(TASK, "median", **QUICK)
    assert plain.model_sha256 == play("none").model_sha256


def test_the_attack_is_part_of_the_fingerprint():
    attacks = [{"kind": "nan", "scale": 1}, {"kind": "nan", "scale": 2}, {"kind": "scaled", "scale": 2}]
    assert len({study_from({"fleet": {"attack": attack}}).fingerprint() for attack in attacks}) == 3


@pytest.mark.parametrize("engine", ["vector", "debug"])
@pytest.mark.parametrize("kind", ["nan", "scaled", "sign-flip"])
@pytest.mark.parametrize("method", ["fedavg", "topk+int8+memory", "fedsim", "stein", "scaffold"])
def test_plain_averaging_stops_at_an_attacker_and_names_it(engine, kind, method):
    """It is no matter of learning rates."""
    attack = {"kind": kind, "share": 0.3, "scale": 1e9}
    with pytest.raises(TrainingError, match=rf"it is a simulated attacker \(fleet.attack.kind: {kind}\)") as caught:
        play(kind, method, engine=engine, fleet={"attack": attack})
    assert "drop fleet.attack" in str(caught.value)
    assert "lr" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_honest_client_is_not_blamed():
    with pytest.raises(TrainingError, match=r"lower (local\.)?lr"):
        play("sign-flip", "fedavg", local={"steps": 3, "lr": 1e6})


CODED = [["topk", "memory", "median"], ["powersgd", "median"], ["dgc", "median"], ["int8", "memory", "trimmed-mean"]]


def kept_after(kind, method, engine, rounds, dropout=0.0):
    """What all clients keep after so many rounds."""
    fleet = {"dropout": dropout, "attack": {"kind": kind, "share": 0.3}}
    study = study_from({**QUICK, "task": TASK, "method": method, "engine": engine, "fleet": fleet})
    job, study = settle_study(study, build_task(**study.task.model_dump()))
    with closing(new_run(study, job, None)) as run:
        server = run.server
        for t in range(1, rounds + 1):
            server, _ = run.engine.round(server, job.fleet.cohort(3, t, 10, 10), t)
        return run.bank.read(torch.arange(10))


@pytest.mark.parametrize("engine", ["vector", "debug"])
@pytest.mark.parametrize("method", CODED, ids="+".join)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_attackers_remember_what_an_honest_client_would(engine, method, dropout):
    """Also where their upload is lost, and what was sent is put back."""
    lying, honest = (kept_after(kind, method, engine, 1, dropout) for kind in ("nan", "none"))
    assert any(name.startswith("up/") for name in lying)
    for name, x in honest.items():
        assert torch.equal(lying[name], x), name
    assert all(bool(x.isfinite().all()) for x in kept_after("nan", method, engine, 3, dropout).values())


def test_attackers_train_and_keep_their_own_tensors_as_others_do():
    """They lie about their update, not to themselves: what they keep, and how they are evaluated, stays sound."""
    runs = [play(kind, ["personal", {"psfed": {"fraction": 0.5}}, "median"], evaluate={"who": ["before", "after"]})
            for kind in ("nan", "none")]  # fmt: skip
    for record in runs[0].table:
        assert record.after_accuracy == record.after_accuracy
        assert record.metrics["stale_divergence"] == record.metrics["stale_divergence"]
    study = study_from({"task": TASK, "fleet": {"attack": {"kind": "nan"}}})
    job, _ = settle_study(study, build_task(**study.task.model_dump()))
    ctx = make_ctx(list(range(10)), clients=10)
    after = job.train(Lesson(job.initial, {}, job.method.local.phases), ctx).after
    assert all(bool(x.isfinite().all()) for x in after.values())
    assert any(not bool(x.isfinite().all()) for x in job.fleet.claim(job.initial, after, ctx).values())


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        ({"kind": "flip"}, r"fleet.attack.kind"),
        ({"share": 1.0}, r"fleet.attack.share"),
        ({"scale": 0}, r"fleet.attack.scale"),
        ({"kinds": "nan"}, r"unknown key 'fleet.attack.kinds'; did you mean 'kind'"),
    ],
)
def test_bad_keys_are_refused(attack, words):
    with pytest.raises(ConfigError, match=words):
        study_from({"fleet": {"attack": attack}})
