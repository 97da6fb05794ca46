"""`ecsq` and `lowrank` over whole rounds against the NumPy reference; clients sit out, and uploads are lost."""

import numpy as np
import pytest
import torch

from reference import compressors, drive, entropy, topk
from sparing.core.compose import compose
from sparing.core.parcel import Leaf, Parcel
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from support import make_ctx, view_of

SHAPES = {"a": (12, 9), "b": (7,), "one": (1,), "c": (8, 6, 3, 3), "d": (16, 2, 3, 3), "e": (5, 14, 3), "f": (2, 4)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))
COUNTS = [16, 10, 32, 8, 9, 31]
COHORTS = [[0, 1, 2], [2, 5], [0, 2, 3, 4], [0, 1, 2], [2, 5], [1, 3, 4, 5]]
LOST = {(1, 5), (3, 0)}
MODEL = {name: torch.zeros(1, *shape) for name, shape in SHAPES.items()}
PLAIN = {name: np.zeros(shape) for name, shape in SHAPES.items()}


def moves(seed=3):
    rng = np.random.default_rng(seed)
    scale = {"a": 1.0, "b": 0.3, "one": 2.0, "c": 0.2, "d": 0.5, "e": 0.1, "f": 0.01}
    return [
        {
            k: {n: (scale[n] * rng.normal(size=s) ** 3).astype(np.float32).astype(float) for n, s in SHAPES.items()}
            for k in ids
        }
        for ids in COHORTS
    ]


def same(recipes, compress, memory, tolerance=1e-5):
    """Whole rounds, with memory or without, to a share of the model's length."""
    lost = LOST if memory else ()
    rounds, states = drive.play(compose(LAYOUT, *recipes), MODEL, moves(), COUNTS, lost=lost)
    residual = {}

    def send(t, k, u):
        wanted = {n: x + residual.get((k, n), 0.0) for n, x in u.items()} if memory else u
        sent = compress(wanted)
        gone = (t, k) in lost
        residual.update({(k, n): wanted[n] - (0 if gone else sent[n]) for n in u})
        return sent

    history = compressors.play(PLAIN, moves(), COUNTS, send, lost=lost)
    for got, wanted in zip(rounds, history, strict=True):
        assert apart({n: got.server.model[n][0].numpy() for n in wanted}, wanted) < tolerance
    if memory:
        left = {(k, n): states[k][f"up/residual/{n}"][0].numpy() for k, n in residual}
        assert apart(left, residual) < 10 * tolerance


def apart(got, wanted):
    """How far, in lengths of what is wanted."""
    far, whole = (
        sum(float((x**2).sum()) for x in xs) for xs in ([got[n] - wanted[n] for n in wanted], wanted.values())
    )
    return (far / whole) ** 0.5


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("options", [{}, {"step": 0.1}, {"step": 3.0}, {"step": 2.0, "over": "layer"}])
def test_ecsq_rounds_are_the_formula(options, memory):
    make = find_recipe("ecsq").make(memory=memory, **options)
    same([make], lambda u: entropy.ecsq(u, options.get("step", 1.0), options.get("over", "model")), memory)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("energy", [0.4, 0.9, 0.99])
def test_lowrank_rounds_are_the_formula(energy, memory):
    """Where a number lies on the edge between two codes, the last bits of a decomposition may decide."""
    make = find_recipe("lowrank").make(energy=energy, memory=memory)
    same([make], lambda u: entropy.lowrank(u, energy), memory, tolerance=0.02)


@pytest.mark.parametrize(
    ("energy", "rank", "alike"), [(0.4, 32, 0.9), (0.8, 32, 0.9), (0.95, 32, 0.9), (0.999, 32, 0.9), (0.95, 2, 0.75)]
)
def test_lowrank_uploads_are_the_formula_but_for_a_code_here_and_there(energy, rank, alike):
    """Fewer uploads are alike where components are found by iteration, in numbers of 15 bits."""
    codec = compose(LAYOUT, find_recipe("lowrank").make(energy=energy, rank=rank)).up[0]
    off = []
    for t, cohort in enumerate([one for seed in range(4) for one in moves(seed)]):
        ids = sorted(cohort)
        ctx = make_ctx(ids, t=t)
        values = {n: torch.tensor(np.stack([cohort[k][n] for k in ids]), dtype=torch.float32) for n in SHAPES}
        if rank < 5:
            values = {n: sharpened(x, rank) for n, x in values.items()}
        out, _ = codec.encode(Parcel({n: Leaf(x) for n, x in values.items()}, {}), {}, view_of(ctx))
        back = codec.decode(out, ctx)
        for i in range(len(ids)):
            wanted = entropy.lowrank({n: x[i].double().numpy() for n, x in values.items()}, energy, rank)
            off.append(apart({n: back.leaves[n].value[i].numpy() for n in wanted}, wanted))
    assert max(off) < 0.05
    assert sum(x < 1e-4 for x in off) > alike * len(off)


def sharpened(x, rank):
    """With strong components set apart from the rest, so that a few steps of iteration find them."""
    if x.ndim < 3:
        return x
    m = x.transpose(2, 3).flatten(3).flatten(1, 2) if x.ndim == 5 else x.flatten(2)
    u, s, vt = torch.linalg.svd(m, full_matrices=False)
    s[:, rank:] *= 0.1
    y = (u * s[:, None]) @ vt
    return y.reshape(x.transpose(2, 3).shape).transpose(2, 3) if x.ndim == 5 else y.reshape(x.shape)


def test_ecsq_behind_topk_goes_by_what_is_sent():
    def compress(u):
        masks = {n: topk.largest(x, 0.2) for n, x in u.items()}
        sent = np.concatenate([x[masks[n]] for n, x in u.items()])
        common = min(0.7 * np.sqrt((sent**2).mean()), np.abs(sent).max())
        steps = {n: entropy.long_enough(common, x) for n, x in u.items()}
        return {n: entropy.codes(np.where(masks[n], x, 0), steps[n]) * steps[n] for n, x in u.items()}

    same([find_recipe("topk").make(ratio=0.2, memory=True), find_recipe("ecsq").make(step=0.7)], compress, memory=True)


def test_the_reference_is_what_it_says():
    assert entropy.codes(np.array([0.6, 0.7, -1.6, -1.7]), 1.0).tolist() == [0, 1, -1, -2]
    x = np.arange(2 * 3 * 2 * 2.0).reshape(2, 3, 2, 2)
    whole = np.pad(x, ((0, 6), (0, 5), (0, 1), (0, 1)))
    m, back = entropy.to_matrix(whole)
    assert m.shape == (24, 24)
    assert (back(m) == whole).all()
    assert m[1 * 3 + 1, 2 * 3 + 1] == x[1, 2, 1, 1]
    exact = {"a": np.outer(np.ones(12), np.ones(9))}
    assert np.allclose(entropy.lowrank(exact, 0.999)["a"], exact["a"], rtol=0.1)
