"""Top-k and random-k by the library against the NumPy reference, over whole rounds, with and without memory."""

import numpy as np
import pytest
import torch

from reference import drive
from reference import topk as reference
from sparing.core.compose import compose
from sparing.core.tree import Layout
from sparing.recipes.randk import randk
from sparing.recipes.topk import topk

SHAPES = {"a": (6, 5), "b": (7,), "one": (1,), "c": (2, 3, 4)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))
COUNTS = [16, 16, 32, 8, 8, 32]
COHORTS = [[0, 1, 2], [2, 5], [0, 2, 3, 4], [0, 1, 2], [2, 5], [1, 3, 4, 5]]  # sums: powers of two
MODEL = {name: torch.zeros(1, *shape) for name, shape in SHAPES.items()}
PLAIN = {name: np.zeros(shape) for name, shape in SHAPES.items()}


def moves():
    """Whole multiples of 1/64, so float32 is exact, with many ties and zeros."""
    rng = np.random.default_rng(3)
    return [
        {k: {name: rng.integers(-4, 5, shape) / 64 for name, shape in SHAPES.items()} for k in cohort}
        for cohort in COHORTS
    ]


def same(played, states, history, residual, memory):
    for got, wanted in zip(played, history, strict=True):
        for name, x in wanted.items():
            np.testing.assert_array_equal(got.server.model[name][0].numpy(), x.astype(np.float32), err_msg=name)
    for k, tree in residual.items():
        for name, x in tree.items():
            if memory:
                np.testing.assert_array_equal(states[k][f"up/residual/{name}"][0].numpy(), x)
            else:
                assert not states[k]


CHOICES = {
    "exact": ({}, lambda u, ratio: {name: reference.largest(x, ratio) for name, x in u.items()}),
    "quantile": ({"mode": "quantile"}, lambda u, ratio: {n: reference.above_quantile(x, ratio) for n, x in u.items()}),
    "over model": ({"over": "model"}, reference.over_model),
}


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("ratio", [0.05, 0.25, 0.5])
@pytest.mark.parametrize("how", CHOICES)
def test_topk_rounds_are_the_formula_to_the_last_bit(how, ratio, memory):
    options, choose = CHOICES[how]
    method = compose(LAYOUT, topk(ratio, memory=memory, **options))
    played, states = drive.play(method, MODEL, moves(), COUNTS)
    wanted = reference.play(PLAIN, moves(), COUNTS, lambda t, k, u: choose(u, ratio), memory)
    same(played, states, *wanted, memory)


@pytest.mark.parametrize("memory", [False, True])
def test_randk_rounds_are_the_formula_given_the_positions(memory):
    """The reference takes over which positions were drawn, and that they are as many as the formula says."""
    method = compose(LAYOUT, randk(0.25, memory=memory))
    played, states = drive.play(method, MODEL, moves(), COUNTS)

    def drawn(t, k, u):
        row = played[t].ctx.ids.tolist().index(k)
        masks = {name: played[t].up.leaves[name].scope[row].numpy() for name in u}
        assert all(mask.sum() == reference.count(0.25, mask.size) for mask in masks.values())
        return masks

    same(played, states, *reference.play(PLAIN, moves(), COUNTS, drawn, memory), memory)


def test_without_memory_what_is_left_out_is_gone():
    models = [drive.play(compose(LAYOUT, topk(0.25, memory=m)), MODEL, moves(), COUNTS)[0] for m in (False, True)]
    assert not torch.equal(models[0][-1].server.model["a"], models[1][-1].server.model["a"])
    assert torch.equal(models[0][0].server.model["a"], models[1][0].server.model["a"]), "no residual in the first round"
