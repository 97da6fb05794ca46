"""Whole rounds of Split-Mix by the library against NumPy: which bases train, how, their means, and the mix."""

import itertools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import sparing
from reference import split_mix as reference
from sparing.core.keys import hashes
from sparing.parts.size.split_mix import split_by_width
from support import make_ctx

SAMPLES = [10, 25, 7, 40, 12]
WIDTHS, SEED = (6, 12, 9, 4), 3


def dense():
    layers: list[tuple[str, nn.Module]] = []
    for i, (a, b) in enumerate(itertools.pairwise(WIDTHS)):
        layers += [(str(i), nn.Linear(a, b)), (f"relu{i}", nn.ReLU())]
    return nn.Sequential(OrderedDict(layers[:-1])).double()


def numbers(state, bases):
    return [{name.removeprefix("net."): x[i].detach().numpy() for name, x in state.items()} for i in range(bases)]


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("bases", [2, 3, 4])
def test_rounds_agree_with_the_reference(bases, clip):
    rng = np.random.default_rng(2)
    data = [(rng.normal(size=(n, 6)), rng.integers(0, 4, n)) for n in SAMPLES]
    test = rng.normal(size=(30, 6)), rng.integers(0, 4, 30)

    def chosen(t, k):
        """Undeclared, client k affords all bases but k modulo their number."""
        ctx = make_ctx([k], seed=SEED, t=t)
        order = np.argsort(hashes(ctx.common.keys("split-mix/first"), bases)[0].numpy())
        more = ctx.choose("split-mix", bases - 1, bases - k % bases - 1)[0].numpy()
        return reference.held(k, order, more)

    first = numbers(split_by_width(dense(), bases, seed=SEED).state_dict(), bases)
    want = reference.play(first, data, chosen, rounds=3, lr=0.3, steps=4, clip=clip)
    result = sparing.run(
        sparing.Task(
            dense,
            train=[(torch.tensor(x), torch.tensor(y)) for x, y in data],
            test=(torch.tensor(test[0]), torch.tensor(test[1])),
        ),
        [{"split-mix": {"ratio": 1 / bases}}],
        rounds=3,
        sample=1.0,
        seed=SEED,
        local={"steps": 4, "batch": max(SAMPLES), "lr": 0.3, "clip": clip},
        plan={"path": "loop"},
    )
    got = numbers(result.model, bases)
    for i, base in enumerate(want):
        for name, x in base.items():
            assert np.abs(x - first[i][name]).max() > 1e-3
            assert np.abs(got[i][name] - x).max() < 1e-7, (i, name)
    assert result.loss == pytest.approx(reference.loss(want, *test), rel=1e-7)
