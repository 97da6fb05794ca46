"""`budget_codec` against brute force: no combination of steps and ranks on a fine grid buys much more for its bytes."""

import numpy as np
import pytest
import torch

from reference import budget as reference
from sparing.core.parcel import Leaf, Parcel
from sparing.core.tree import Layout
from sparing.parts.code.budget.byte_budget import budget_codec
from sparing.wire import nbytes
from support import make_ctx, view_of

SHAPES = {"a": (100, 60), "b": (80, 80), "c": (120,)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))


MOST = 2000


def update(seed, rates, scale):
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in SHAPES.items():
        x = rng.normal(size=shape)
        if len(shape) == 2:
            u, _, vt = np.linalg.svd(x, full_matrices=False)
            x = 12 * (u * rates[name] ** np.arange(len(vt))) @ vt
        out[name] = (scale.get(name, 1.0) * x).astype(np.float32).astype(float)
    return out


@pytest.mark.parametrize("by", ["best", "values", "components"])
@pytest.mark.parametrize(
    ("rates", "scale"),
    [
        ({"a": 0.5, "b": 0.97}, {"c": 0.1}),
        ({"a": 0.8, "b": 0.6}, {"a": 0.3}),
        ({"a": 0.99, "b": 0.99}, {"b": 0.2, "c": 2.0}),
    ],
)
def test_no_combination_of_steps_and_ranks_is_much_better(rates, scale, by):
    """The reference pays by entropy: no header, no chances, no leaf that says nothing."""
    codec, ctx = budget_codec(LAYOUT, MOST, by), make_ctx([0])
    for seed in range(2):
        values = update(seed, rates, scale)
        tree = {n: torch.tensor(x, dtype=torch.float32)[None] for n, x in values.items()}
        out, _ = codec.encode(Parcel({n: Leaf(x) for n, x in tree.items()}, {}), {}, view_of(ctx))
        back = codec.decode(out, ctx).leaves
        error = sum(float((back[n].value[0].double() - torch.tensor(x)).square().sum()) for n, x in values.items())
        nothing = codec.encode(Parcel({n: Leaf(0 * x) for n, x in tree.items()}, {}), {}, view_of(ctx))[0]
        spent = int(nbytes(out)[0]) - int(nbytes(nothing)[0])
        whole = sum(float((x**2).sum()) for x in values.values())
        steps = np.sqrt(whole / 12520) * 2.0 ** np.arange(-3, 4, 0.25)
        assert 0.9 * MOST < int(nbytes(out)[0]) <= MOST
        much = 1.15 if by == "components" else 1.06  # of noise, a few steps of iteration do not find the strongest
        assert error < much * reference.least(values, spent, steps, by)


def test_the_reference_is_what_it_says():
    assert reference.entropy(np.array([0, 0, 1, 1])) == 0.5
    assert reference.frontier([(1, 5), (2, 6), (3, 4)]) == [(1, 5), (3, 4)]
    x = np.outer(np.ones(8), np.ones(6))
    assert min(error for size, error in reference.ways(x, [0.1]) if size < 1) < 0.01
    one = {"x": np.array([3.0, 0, 0, 0])}
    assert reference.least(one, 0, [1.0]) == 9
    assert reference.least(one, 1, [1.0]) == 0
