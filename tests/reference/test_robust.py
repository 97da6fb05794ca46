"""Robust blends by the library against NumPy: the rules alone with any votes, and whole rounds."""

import numpy as np
import pytest
import torch

from reference import robust as reference
from sparing.core.compose import compose
from sparing.core.method import Trained
from sparing.core.registry import find_recipe
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, settle
from sparing.core.tree import Layout
from sparing.parts.blend import robust
from support import make_ctx

SHAPES = {"w": (4, 3), "b": (5,), "one": ()}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))
RULES = [
    (robust.coordinate_median, reference.median, {}),
    (robust.trimmed_mean_rule(0.3), reference.trimmed_mean, {"share": 0.3}),
    (robust.trimmed_mean_rule(0.0), reference.trimmed_mean, {"share": 0.0}),
    (robust.krum_rule(0.3, 1), reference.krum, {"share": 0.3}),
    (robust.krum_rule(0.25, "most"), reference.krum, {"share": 0.25, "m": "most"}),
    (robust.krum_rule(0.0, 3), reference.krum, {"share": 0.0, "m": 3}),
    (robust.krum_rule(0.45, "most"), reference.krum, {"share": 0.45, "m": "most"}),
    (robust.geometric_median_rule(1e-6, 4), reference.geomed, {}),
    (robust.geometric_median_rule(0.5, 7), reference.geomed, {"nu": 0.5, "steps": 7}),
]


def flat_rows(tree):
    """One row per client over all tensors, in name order."""
    return np.concatenate([x.reshape(len(x), -1).double().numpy() for _, x in sorted(tree.items())], axis=1)


@pytest.mark.parametrize(("rule", "formula", "options"), RULES)
@pytest.mark.parametrize("n", [1, 2, 5, 8, 11])
@pytest.mark.parametrize("chance", [1.0, 0.6, 0.15])
def test_rules(rule, formula, options, n, chance):
    g = torch.Generator().manual_seed(n)
    values = {name: torch.randn(n, *shape, generator=g) * 3 for name, shape in SHAPES.items()}
    votes = {name: torch.rand(n, *shape, generator=g) < chance for name, shape in SHAPES.items()}
    weight = torch.rand(n, generator=g, dtype=torch.float64) + 0.1
    update, covered = rule(values, votes, weight)
    x = np.where(flat_rows(votes) > 0, flat_rows(values), np.nan)
    assert np.allclose(flat_rows(update)[0], formula(x, weight.numpy(), **options), rtol=1e-10, atol=1e-12)
    if formula is not reference.krum:
        assert np.array_equal(flat_rows(covered)[0] > 0, (~np.isnan(x)).any(axis=0))


METHODS = [
    ("median", {}, reference.median),
    ("trimmed-mean", {"share": 0.2}, reference.trimmed_mean),
    ("krum", {"share": 0.2}, reference.krum),
    ("krum", {"share": 0.2, "m": "most"}, reference.krum),
    ("geomed", {}, reference.geomed),
    ("norm-bound", {"bound": 2.0}, reference.norm_bound),
]


@pytest.mark.parametrize("partly", [False, True])
@pytest.mark.parametrize(("name", "options", "formula"), METHODS)
def test_whole_rounds(name, options, formula, partly):
    """Also where every client shares a random part of its own."""
    share = [find_recipe("psfed").make(fraction=0.5, per_client=True)] if partly else []
    method = compose(LAYOUT, *share, find_recipe(name).make(**options))
    model = {n: torch.zeros(1, *shape) for n, shape in SHAPES.items()}
    server, rng, moved = first_server(method, model, 12), np.random.default_rng(1), 0
    for t, ids in enumerate([[0, 3, 5, 6, 7, 8], [1, 2, 3, 4, 9, 10, 11], [2, 4, 6]], 1):
        ctx = make_ctx(ids, t=t, clients=12)
        fold, rows = begin(method, server, ctx), []
        for k in range(len(ids)):
            one = ctx.at(slice(k, k + 1))

            def train(lesson, ctx, k=k):
                size = 5.0 if k == 1 else 1.0
                after = {
                    n: x + size * torch.tensor(rng.normal(size=x.shape), dtype=x.dtype) for n, x in lesson.start.items()
                }
                return Trained(after, lesson.memory, {"loss": torch.zeros(1)})

            down = outgoing(method, server, one)
            up, _ = client(method, first_client(method, model), down, train, one)
            rows.append({n: leaf.value.where(torch.as_tensor(leaf.scope is None or leaf.scope), torch.tensor(torch.nan))
                         for n, leaf in up.leaves.items()})  # fmt: skip
            incoming(method, server, fold, down, up, one)
        after, report = settle(method, server, fold, ctx)
        x = np.concatenate([flat_rows(row) for row in rows])
        want = flat_rows(server.model)[0] + formula(x, ctx.n.double().numpy(), **options)
        assert np.allclose(flat_rows(after.model)[0], want, rtol=1e-6, atol=1e-6)
        assert report["refused"] == 0
        moved += not np.allclose(want, flat_rows(server.model)[0])
        server = after
    assert moved == 3
