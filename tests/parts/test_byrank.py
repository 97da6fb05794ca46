"""Weights by rank and the history rule."""

import math

import pytest
import torch

from sparing.core.errors import ConfigError
from sparing.core.method import Arrival, Blended
from sparing.parts.size.fedhm.rank_weights import history_step, rank_weigh
from support import make_ctx

RATIOS = (1, 0.5, 0.25, 0.125)


def sizes(ctx):
    return ctx.ids % 4


def arrival(ids, n=None):
    ctx = make_ctx(ids, n)
    return Arrival({}, {}, {"n": ctx.n.float()}, {}, ctx)


def omegas(weighting, temperature, ids):
    weight, _ = rank_weigh(weighting, temperature, RATIOS, sizes).of({}, arrival(ids))
    return weight / weight.sum()


@pytest.mark.parametrize("weighting", ["ratio", "factor", "uniform"])
def test_weights_sum_to_one_and_fit_the_fold(weighting):
    weigh = rank_weigh(weighting, 0.7, RATIOS, sizes)
    came = arrival([0, 1, 2, 3, 7])
    weight, _ = weigh.of({}, came)
    assert weight.dtype == torch.float64
    assert float((weight / weight.sum()).sum()) == pytest.approx(1, abs=1e-12)
    assert float(weight.sum()) <= weigh.most(came.ctx)


def test_softmax_of_ratio_and_of_factor():
    ids = [0, 1, 2, 3, 4]
    gamma = torch.tensor([1, 0.5, 0.25, 0.125, 1]).double()
    assert torch.allclose(omegas("ratio", 0.3, ids), (gamma / 0.3).softmax(0))
    assert torch.allclose(omegas("factor", 2.0, ids), (-1 / gamma / 2).softmax(0))
    assert torch.allclose(omegas("uniform", 1.0, ids), torch.full((5,), 0.2).double())


@pytest.mark.parametrize("weighting", ["ratio", "factor"])
def test_at_infinite_temperature_all_count_alike(weighting):
    assert torch.allclose(omegas(weighting, 1e9, [0, 1, 2, 3]), torch.full((4,), 0.25).double(), atol=1e-8)
    assert torch.equal(omegas(weighting, math.inf, [0, 1, 2, 3]), torch.full((4,), 0.25).double())


@pytest.mark.parametrize("temperature", [0, -1.0])
def test_temperatures_are_above_zero(temperature):
    with pytest.raises(ConfigError, match=r"fedhm.temperature is"):
        rank_weigh("ratio", temperature, RATIOS, sizes)


def settled(step, ids, n=None):
    seen = step.watch({}, arrival(ids, n))
    update = {"w": torch.ones(1, 3).double()}
    blended = Blended(update, {"w": None}, torch.tensor(ids), torch.ones(len(ids)).double(), seen)
    return (update, *step.apply({}, blended, make_ctx(ids)))


@pytest.mark.parametrize("weighting", ["ratio", "factor", "uniform", "samples"])
def test_with_the_largest_rank_there_nothing_happens(weighting):
    update, after, _, report = settled(history_step(weighting, 1.0, RATIOS, sizes), [1, 4, 7])
    assert after is update
    assert report == {"history": 0.0}


def test_without_it_the_old_model_joins_as_one_client_of_ratio_one():
    e = math.exp
    shares = {
        "ratio": e(1) / (e(1) + e(0.5) + e(0.25)),
        "factor": e(-1) / (e(-1) + e(-2) + e(-4)),
        "uniform": 1 / 3,
        "samples": 1 / 3,
    }
    for weighting, share in shares.items():
        _, after, _, report = settled(history_step(weighting, 1.0, RATIOS, sizes), [1, 2], n=[10, 30])
        assert report["history"] == pytest.approx(share)
        assert torch.allclose(after["w"], torch.full((1, 3), 1 - share).double())


def test_where_one_is_not_offered_the_largest_offered_counts():
    step = history_step("ratio", 1.0, (0.5, 0.25, 0.2, 0.1), sizes)
    assert settled(step, [0, 1])[3]["history"] == 0
    share = math.exp(1) / (math.exp(1) + math.exp(0.25))
    assert settled(step, [1])[3]["history"] == pytest.approx(share)
    cold = history_step("ratio", 1e-4, (0.5, 0.25, 0.2, 0.1), sizes)
    assert settled(cold, [1])[3]["history"] == pytest.approx(1), "no overflow"
