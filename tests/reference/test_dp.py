"""The library's private rounds against the NumPy ones: clipping, keyed noise, adaptive bounds, lost uploads."""

import numpy as np
import pytest
import torch

from reference import dp as reference
from reference import drive
from sparing.core.compose import compose
from sparing.core.tree import Layout
from sparing.recipes.dp import dp
from sparing.recipes.obfuscate import obfuscate
from sparing.runs.privacy.secret import Secret

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


SECRET = bytes(range(32))


def play_secretly(*recipes):
    """The same rounds with noise from a secret; and what the noise was drawn for: (round, client, tag) -> values."""
    model, moves = made()
    secret, asked = Secret(SECRET), {}

    def words(ctx, tag, n, values=None):
        drawn = secret.words(ctx, tag, n, values)
        for i, who in enumerate(ctx.ids.tolist()):
            asked[ctx.round, who, tag] = None if values is None else values[i].numpy(), drawn[i].numpy()
        return drawn

    played, _ = drive.play(compose(LAYOUT, *recipes, words=words), model, moves, COUNTS, lost=LOST)
    return played, {n: x[0].double().numpy() for n, x in model.items()}, moves, asked


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


@pytest.mark.parametrize("adaptive", [False, True])
def test_central_noise_from_a_secret(adaptive):
    """Drawn for the mean and its deviation, by the formula; and that is what the model moves by."""
    noise, bound, count_noise = 0.5, 1.0, 0.8
    options = {"adaptive": True, "count_noise": count_noise} if adaptive else {}
    played, model, moves, asked = play_secretly(dp(noise=noise, clip=bound, **options))
    given = reference.split(noise, count_noise) if adaptive else noise
    for t, (r, cohort) in enumerate(zip(played, moves, strict=True), start=1):
        arrived = [reference.clipped(u, bound) for u in here(t, cohort).values()]
        for name, x in model.items():
            *mean, deviation = asked[t, -1, f"dp/{name}"][0]
            np.testing.assert_allclose(mean, sum(u[name] for u in arrived).ravel() / len(arrived), rtol=0, atol=1e-6)
            assert deviation == pytest.approx(given * bound / len(arrived))
            drawn = reference.secret_normals(SECRET, t, -1, f"dp/{name}", mean, deviation)
            moved = r.server.model[name][0].double().numpy() - x
            np.testing.assert_allclose(moved.ravel(), mean + deviation * drawn, rtol=0, atol=2e-6)
        model = {n: x[0].double().numpy() for n, x in r.server.model.items()}
        if adaptive:
            within, scale = asked[t, -1, "dp within"][0]
            assert (within, scale) == (sum(reference.length(u) <= bound for u in here(t, cohort).values()), count_noise)
            drawn = float(reference.secret_normals(SECRET, t, -1, "dp within", [within], scale)[0])
            bound = bound * np.exp(-0.2 * ((within + scale * drawn) / len(arrived) - 0.5))
            assert float(r.server.blend["0/clip"]) == pytest.approx(bound, rel=1e-6)


def test_local_noise_from_secrets_of_the_clients():
    noise, bound = 0.1, 3.0
    played, _, moves, asked = play_secretly(dp(noise=noise, clip=bound, mode="local"))
    for t, (r, cohort) in enumerate(zip(played, moves, strict=True), start=1):
        for i, (k, u) in enumerate(cohort.items()):
            for name, x in reference.clipped(u, bound).items():
                *values, deviation = asked[t, k, f"dp/{name}"][0]
                np.testing.assert_allclose(values, x.ravel(), rtol=0, atol=2e-6)
                assert deviation == pytest.approx(noise * bound)
                drawn = reference.secret_normals(SECRET, t, k, f"dp/{name}", values, deviation)
                sent = r.up.leaves[name].value[i].double().numpy().ravel()
                np.testing.assert_allclose(sent, values + deviation * drawn, rtol=0, atol=2e-6)


def test_obfuscation_from_secrets_of_the_clients():
    played, _, moves, asked = play_secretly(obfuscate(noise=0.5))
    for t, (r, cohort) in enumerate(zip(played, moves, strict=True), start=1):
        for i, (k, u) in enumerate(cohort.items()):
            for name, x in u.items():
                *values, deviation = asked[t, k, f"obfuscate/{name}"][0]
                np.testing.assert_allclose(values, x.ravel(), rtol=0, atol=2e-6)
                assert deviation == pytest.approx(0.5 * np.sqrt((x**2).mean()), rel=1e-5)
                drawn = reference.secret_normals(SECRET, t, k, f"obfuscate/{name}", values, deviation)
                sent = r.up.leaves[name].value[i].double().numpy().ravel()
                np.testing.assert_allclose(sent, values + deviation * drawn, rtol=1e-6, atol=2e-6)


def test_a_rotation_is_drawn_from_the_runs_secret_so_that_the_server_can_undo_it():
    _, _, moves, asked = play_secretly(obfuscate(rotate=True))
    for t, cohort in enumerate(moves, start=1):
        for k in cohort:
            values, words = asked[t, k, "obfuscate/a.weight"]
            assert values is None
            np.testing.assert_array_equal(
                words.view("<u8"), reference.shared_words(SECRET, t, k, "obfuscate/a.weight", 30)
            )
