"""The library's private rounds against the NumPy ones: clipping, keyed noise, adaptive bounds, lost uploads."""

import numpy as np
import pytest
import torch

from reference import dp as reference
from reference import drive
from sparing.core.compose import compose
from sparing.core.tree import Layout
from sparing.recipes.dp import dp

SHAPES = {"a.weight": (6, 5), "a.bias": (5,), "b.weight": (7, 3)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))
COUNTS = [5, 9, 2, 7, 30, 4]
SEED = 7  # of drive.play
LOST = {(1, 2), (3, 0)}


def made(seed=0):
    """(model, moves): five rounds of four clients, some of whose moves are long and some short."""
    g = np.random.default_rng(seed)
    draw = lambda size: {n: (size * g.normal(size=s)).astype(np.float32) for n, s in SHAPES.items()}  # noqa: E731
    model = {n: torch.from_numpy(x)[None] for n, x in draw(1.0).items()}
    cohorts = [[0, 1, 2, 3], [2, 3, 4, 5], [0, 2, 4, 5], [0, 1, 3, 5], [1, 2, 3, 4]]
    return model, [{k: draw(10 ** g.uniform(-2, 0.5)) for k in ids} for ids in cohorts]


def play(**options):
    model, moves = made()
    played, _ = drive.play(compose(LAYOUT, dp(source="seed", **options)), model, moves, COUNTS, lost=LOST)
    start = {n: x[0].double().numpy() for n, x in model.items()}
    return played, start, moves


def here(t, moves):
    return {k: u for k, u in moves.items() if (t - 1, k) not in LOST}


def close(server, expected):
    for name, x in expected.items():
        np.testing.assert_allclose(server.model[name][0].numpy(), x, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("noise", "bound"), [(1.0, 1.0), (0.3, 2.5), (0.0, 0.1), (2.0, 100.0)])
def test_central(noise, bound):
    played, model, moves = play(noise=noise, clip=bound)
    for t, (r, cohort) in enumerate(zip(played, moves, strict=True), start=1):
        arrived = here(t, cohort)
        model = reference.central(model, list(arrived.values()), bound, noise, SEED, t)
        close(r.server, model)
        assert r.report["dp_noise"] == pytest.approx(noise * bound / len(arrived))


@pytest.mark.parametrize(("noise", "bound"), [(1.0, 1.0), (0.1, 3.0)])
def test_local(noise, bound):
    played, model, moves = play(noise=noise, clip=bound, mode="local")
    for t, (r, cohort) in enumerate(zip(played, moves, strict=True), start=1):
        model = reference.local(model, here(t, cohort), bound, noise, SEED, t)
        close(r.server, model)


@pytest.mark.parametrize(("quantile", "rate", "count_noise"), [(0.5, 0.2, 0.8), (0.9, 1.0, 3.0), (0.0, 0.5, 1.5)])
def test_adaptive(quantile, rate, count_noise):
    noise, bound = 0.5, 1.0
    played, model, moves = play(
        noise=noise, clip=bound, adaptive=True, quantile=quantile, rate=rate, count_noise=count_noise
    )
    given = reference.split(noise, count_noise)
    for t, (r, cohort) in enumerate(zip(played, moves, strict=True), start=1):
        arrived = list(here(t, cohort).values())
        assert r.report["dp_clip"] == pytest.approx(bound, rel=1e-6)
        model = reference.central(model, arrived, bound, given, SEED, t)
        close(r.server, model)
        bound = reference.next_bound(bound, arrived, count_noise, quantile, rate, SEED, t)
    bounds = [r.report["dp_clip"] for r in played]
    assert len(set(bounds)) == len(bounds)
