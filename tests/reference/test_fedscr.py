"""FedSCR by the library against the NumPy reference, over whole rounds with absences and lost uploads."""

import numpy as np
import pytest
import torch
from torch import nn

from reference import drive
from reference import fedscr as reference
from sparing.core.compose import compose
from sparing.core.tree import layout_of
from sparing.recipes.fedscr import fedscr

NET = nn.Sequential(
    nn.Conv2d(3, 5, 3),
    nn.Conv2d(5, 4, 1, bias=False),
    nn.Conv2d(4, 4, 3, groups=4),
    nn.Conv1d(4, 6, 2),
    nn.Linear(6, 4),
)
LAYOUT = layout_of(NET)
CONVS = ["0.weight", "1.weight", "2.weight", "3.weight"]
COUNTS = [16, 16, 32, 8, 8, 32]
COHORTS = [[0, 1, 2], [2, 3, 4, 5], [0, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 2], [1, 3, 4, 5]]
LOST = {(1, 3), (1, 4), (3, 1), (3, 5)}


def moves(exact, seed=0):
    """Whole multiples of 1/64, for which float32 makes no error; or any numbers."""
    rng = np.random.default_rng(seed)

    def one(shape):
        quiet = rng.random(shape) < 0.3
        x = rng.integers(-9, 10, shape) / 64 if exact else rng.normal(size=shape) / 16
        return np.where(quiet, 0.0, x)

    return [{k: {name: one(shape) for name, shape in LAYOUT.shapes.items()} for k in cohort} for cohort in COHORTS]


def first_model(exact):
    rng = np.random.default_rng(9)
    return {
        name: torch.tensor(rng.integers(-8, 9, shape) / 8 if exact else rng.normal(size=shape), dtype=torch.float32)[
            None
        ]
        for name, shape in LAYOUT.shapes.items()
    }


def plain(model):
    return {name: x[0].numpy() for name, x in model.items()}


@pytest.mark.parametrize(
    ("threshold", "mode"),
    [(0.5, "absolute"), (2.0, "absolute"), (0.0, "absolute"), (0.5, "relative"), (0.75, "relative"), (0.5, "budget")],
)
def test_rounds_are_the_formula_to_the_last_bit(threshold, mode):
    model, made = first_model(True), moves(True)
    sums = [sum(COUNTS[k] for k in cohort if (t, k) not in LOST) for t, cohort in enumerate(COHORTS)]
    assert all(n & (n - 1) == 0 for n in sums), "so that weights are exact too"
    played, states = drive.play(compose(LAYOUT, fedscr(threshold, mode)), model, made, COUNTS, lost=LOST)
    history, residual, pruned, _ = reference.play(plain(model), made, COUNTS, CONVS, threshold, mode, lost=LOST)
    shares = [share for gone in pruned for share in gone.values()]
    assert min(shares) < 1, "something is sent"
    assert threshold == 0 or max(shares) > 0, "and something is not"
    for got, wanted, gone in zip(played, history, pruned, strict=True):
        for name, x in wanted.items():
            np.testing.assert_array_equal(got.server.model[name][0].numpy(), x.astype(np.float32), err_msg=name)
        for name in CONVS:
            assert got.report[f"pruned_share/{name}"] == pytest.approx(gone[name], abs=1e-12)
    for k, tree in residual.items():
        for name, x in tree.items():
            np.testing.assert_array_equal(states[k][f"up/residual/{name}"][0].numpy(), x)


def test_the_unbiased_aggregation_is_the_formula():
    model, made = first_model(False), moves(False)
    method = compose(LAYOUT, fedscr(0.8, aggregation="unbiased"))
    played, _ = drive.play(method, model, made, COUNTS, samples=100, lost=LOST)
    history, *_ = reference.play(plain(model), made, COUNTS, CONVS, 0.8, everyone=(6, 100), lost=LOST)
    for got, wanted in zip(played, history, strict=True):
        for name, x in wanted.items():
            np.testing.assert_allclose(got.server.model[name][0].numpy(), x, atol=2e-6)


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_adaptive_thresholds_are_the_formula(mode):
    model, made = first_model(False), moves(False, seed=1)
    rng = np.random.default_rng(2)
    losses = [{k: float(np.float32(rng.gamma(2.0))) for k in cohort} for cohort in COHORTS]
    both = [{k: (tree, losses[t][k]) for k, tree in cohort.items()} for t, cohort in enumerate(made)]
    method = compose(LAYOUT, fedscr(0.9, mode, adaptive=True))
    played, _ = drive.play(method, model, made, COUNTS, lost=LOST, losses=losses)
    history, _, _, used = reference.play(plain(model), both, COUNTS, CONVS, 0.9, mode, lost=LOST, adaptive=True)
    for got, wanted, thresholds in zip(played, history, used, strict=True):
        told = dict(zip(got.ctx.ids.tolist(), got.down.notes["threshold"].tolist(), strict=True))
        assert told == pytest.approx(thresholds, rel=1e-5)
        for name, x in wanted.items():
            np.testing.assert_allclose(got.server.model[name][0].numpy(), x, atol=2e-6)
