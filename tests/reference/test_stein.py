"""Shrinkage by the library against the two-pass NumPy reference, round after round."""

import numpy as np
import pytest
import torch

from reference import stein as reference
from sparing.core.compose import compose
from sparing.core.method import Trained, Weigh
from sparing.core.round import begin, client, first_server, incoming, outgoing, settle
from sparing.core.tree import Layout
from sparing.recipes.stein import stein
from support import make_ctx

CLIENTS, SHAPES = 12, {"w": (6, 5), "b": (7,), "tiny": (2,), "count": ()}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32), frozenset({"count"}))
COHORTS = [[0, 3, 5, 6], [1, 2, 3, 9, 11], [4, 5, 6], [0, 1, 7, 8, 10], [2, 3, 4], [5, 8, 9, 10]]


def play(weights=None, **options):
    """The server's moves and its reports, and what every client sent."""
    method = compose(LAYOUT, stein(**options))
    if weights:
        method = method._replace(blend=method.blend._replace(weigh=weights))
    rng = np.random.default_rng(0)
    drift = {name: rng.normal(size=shape) for name, shape in SHAPES.items()}
    server = first_server(method, {name: torch.zeros(1, *shape) for name, shape in SHAPES.items()}, CLIENTS)
    out = []
    for t, ids in enumerate(COHORTS, 1):
        ctx = make_ctx(ids, t=t, clients=CLIENTS)
        fold, sent = begin(method, server, ctx), {}
        for k in range(len(ids)):
            one = ctx.at(slice(k, k + 1))

            def train(lesson, ctx):
                noise = {n: drift[n] + rng.normal(size=s) for n, s in SHAPES.items()}
                moved = {n: lesson.start[n] + torch.tensor(noise[n], dtype=torch.float32)[None] for n in SHAPES}
                return Trained(moved, lesson.memory, {"loss": torch.zeros(1)})

            down = outgoing(method, server, one)
            up, _ = client(method, {}, down, train, one)
            sent[ids[k]] = {n: leaf.value[0].double().numpy().reshape(-1) for n, leaf in up.leaves.items()}
            incoming(method, server, fold, down, up, one)
        moved, report = settle(method, server, fold, ctx)
        step = {n: (moved.model[n] - server.model[n])[0].double().numpy().reshape(-1) for n in SHAPES}
        out.append((ctx, sent, step, report))
        server = moved
    return out


def cohorts(played, name, weigh):
    return [(np.stack([sent[i][name] for i in sorted(sent)]), weigh(ctx)) for ctx, sent, _, _ in played]


@pytest.mark.parametrize(("beta", "warmup"), [(0.9, 2), (0.5, 0), (0.9, 5), (1.0, 1)])
def test_every_round_is_the_formula(beta, warmup):
    played = play(beta=beta, warmup=warmup)
    for name in ("w", "b", "tiny"):
        wanted = reference.rounds(cohorts(played, name, lambda ctx: ctx.n.numpy()), beta, warmup, CLIENTS)
        for (c, g), (_, _, step, report) in zip(wanted, played, strict=True):
            assert report[f"c/{name}"] == pytest.approx(c, abs=1e-6)
            np.testing.assert_allclose(step[name], g, atol=2e-5)
    assert any(0.2 < report["c/w"] < 1 for *_, report in played) or warmup == 5


def test_over_any_weighting():
    skewed = Weigh(of=lambda state, a: ((a.ctx.ids.double() + 1) ** 2, {}), most=lambda ctx: float(144 * ctx.cohort))
    played = play(weights=skewed, warmup=1)
    wanted = reference.rounds(cohorts(played, "w", lambda ctx: (ctx.ids.numpy() + 1.0) ** 2), 0.9, 1, CLIENTS)
    for (c, g), (_, _, step, report) in zip(wanted, played, strict=True):
        assert report["c/w"] == pytest.approx(c, abs=1e-6)
        np.testing.assert_allclose(step["w"], g, atol=2e-5)


@pytest.mark.parametrize("target", ["zero", "uniform"])
def test_the_other_targets(target):
    played = play(target=target, warmup=0)
    for ctx, sent, step, report in played:
        deltas = np.stack([sent[i]["w"] for i in sorted(sent)])
        m = np.zeros(30) if target == "zero" else deltas.mean(0)
        c, g = reference.shrink(deltas, ctx.n.numpy(), m, CLIENTS)
        assert report["c/w"] == pytest.approx(c, abs=1e-6)
        np.testing.assert_allclose(step["w"], g, atol=2e-5)


def test_the_literal_formula_is_a_constant():
    for *_, report in play(estimator="literal", warmup=1)[1:]:
        assert report["c/w"] == pytest.approx(0.2)  # 2 / 30, clamped
        assert report["c/b"] == pytest.approx(2 / 7)
