"""dp under secure aggregation: noise from clients, in the sum of those who must be there as much as was promised."""

import math

import numpy as np
import pytest
import torch

import sparing
from secure_round.studies import COMMON, SHARED, STUDY, TASK
from sparing.core.context import context
from sparing.core.errors import ConfigError, MethodError, SparingError
from sparing.core.parcel import Leaf, Parcel
from sparing.parts.code.privacy import noise_share_codec
from sparing.secure_round.settings import SecureSettings
from support import view_of

SECRET = bytes(range(32))
BOUND, NOISE = 0.7, 1.3


def noise_of_sum(cohort: int, ids: list[int], honest, t: int) -> torch.Tensor:
    """The sum of what these clients send, who have learned nothing."""
    ctx = context(0, t, 20, ids, [10] * len(ids), 200, 2000, cohort=cohort)
    nothing = Parcel({"w": Leaf(torch.zeros(len(ids), 50))}, {"loss": torch.ones(len(ids))})
    sent, _ = noise_share_codec(BOUND, NOISE, honest).encode(nothing, {}, view_of(ctx))
    assert not sent.notes["loss"].any(), "a sum of losses has no noise"
    return sent.leaves["w"].value.double().sum(0)


@pytest.mark.parametrize(("cohort", "colluding"), [(10, 0), (20, 2), (60, 5)])
def test_the_fewest_honest_clients_add_the_promised_noise(cohort, colluding):
    settings = SecureSettings(colluding=colluding)
    fewest = settings.honest(cohort)
    sums = torch.cat([noise_of_sum(cohort, list(range(fewest)), settings.honest, t) for t in range(1, 101)])
    assert float(sums.std()) == pytest.approx(NOISE * BOUND, rel=0.04)
    assert float(sums.mean()) == pytest.approx(0, abs=5 * NOISE * BOUND / math.sqrt(len(sums)))
    more = torch.cat([noise_of_sum(cohort, list(range(cohort)), settings.honest, t) for t in range(1, 51)])
    assert float(more.std()) == pytest.approx(NOISE * BOUND * math.sqrt(cohort / fewest), rel=0.04)


def test_noise_of_clients_and_rounds_is_unrelated():
    one, other, later = (noise_of_sum(10, [who], lambda n: 5, t) for who, t in ((1, 1), (2, 1), (1, 2)))
    assert len({tuple(x.tolist()) for x in (one, other, later)}) == 3
    many = np.array([[noise_of_sum(10, [who], lambda n: 5, t).numpy() for who in (1, 2)] for t in range(1, 60)])
    assert abs(np.corrcoef(many[:, 0].ravel(), many[:, 1].ravel())[0, 1]) < 0.1


def test_an_update_is_clipped_before_noise():
    ctx = context(0, 1, 20, [0], [10], 200, 2000, cohort=10)
    large = Parcel({"w": Leaf(torch.full((1, 50), 9.0))}, {"loss": torch.ones(1)})
    sent, _ = noise_share_codec(BOUND, 0.0, lambda n: 5).encode(large, {}, view_of(ctx))
    assert float(sent.leaves["w"].value.norm()) == pytest.approx(BOUND, rel=1e-5)


def private_run(dp: dict, secure=True, task=TASK, **other):
    return sparing.run(task, [{"dp": dp}], secret=SECRET, **STUDY | {"secure": secure} | other)


def test_engines_agree_and_the_loss_is_not_told():
    runs = [private_run({"noise": 0.5}, engine=engine, plan={"path": "loop"}) for engine in ("debug", "vector")]
    assert runs[0].model_sha256 == runs[1].model_sha256
    assert {record.train_loss for run in runs for record in run.table} == {0.0}


@pytest.mark.filterwarnings("ignore:round .* counts for nobody")
def test_more_who_arrive_mean_more_noise_which_is_reported():
    study = {"sample": 8, "rounds": 5, "evaluate": {"every": 5, "clients": 1}, "fleet": {"dropout": 0.12}}
    run = private_run({"noise": 0.5, "clip": 2.0}, **study)
    honest, seen = SecureSettings().honest(8), set()
    for record in run.table:
        if record.clients:
            seen.add(record.clients)
            sum_noise = record.metrics["dp_noise"] * record.clients
            assert sum_noise == pytest.approx(0.5 * 2.0 * math.sqrt(record.clients / honest))
            assert sum_noise >= 0.5 * 2.0
    assert len(seen) > 1


def epsilon_of(run) -> float:
    return run.table[-1].metrics["epsilon"]


def test_the_server_knows_who_takes_part_so_sampling_amplifies_nothing():
    """As much as noise on every upload would cost the client that took part most often, and more than central noise."""
    task, study = TASK | {"clients": 12}, {"rounds": 3, "sample": 5, "evaluate": {"every": 3}}
    summed, local, central = (
        epsilon_of(private_run({"noise": 1.5, **mode}, secure, task, **study))
        for mode, secure in (({}, True), ({"mode": "local"}, False), ({}, False))
    )
    assert summed == local
    assert summed > central


REFUSED = {
    "set adaptive: false": [{"dp": {"adaptive": True}}],
    "drop": ["dp", COMMON],
    "memory": ["dp", SHARED, "memory"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_noise_of_clients_cannot_cover_is_refused(words):
    with pytest.raises((MethodError, ConfigError), match=words) as error:
        sparing.run(TASK, REFUSED[words], secure=True, secret=SECRET, **STUDY)
    assert "; " in str(error.value)


def test_every_uploads_own_noise_is_possible_too():
    runs = [
        sparing.run(TASK, [{"dp": {"mode": "local", "noise": 0.1}}], engine="debug", secret=SECRET, secure=on, **STUDY)
        for on in (False, True)
    ]
    assert runs[0].model_sha256 == runs[1].model_sha256


def test_budgets_end_a_run_as_without_masks():
    with pytest.raises(SparingError, match="epsilon"):
        private_run({"noise": 0.3, "epsilon": 0.5})
