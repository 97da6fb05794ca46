"""FedSim and both forms of pFedSim against the NumPy reference, over whole rounds with training replaced by moves."""

import numpy as np
import pytest
import torch
from torch import nn

from reference import pfedsim as reference
from sparing.core.compose import compose
from sparing.core.context import context
from sparing.core.method import Trained
from sparing.core.round import begin, client, first_client, first_row, first_server, incoming, outgoing, settle
from sparing.core.tree import layout_of, row_count, under
from sparing.recipes.fedsim import fedsim
from sparing.recipes.pfedsim import pfedsim
from sparing.storage.bank import MemoryBank

LAYOUT = layout_of(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(5, 4), nn.Linear(4, 3)))
HEAD, HOME = "2.weight", ("2.weight", "2.bias")
COUNTS = [12, 30, 7, 7, 51, 20, 3]
COHORTS = [[0, 1, 2, 4], [1, 3, 4, 5], [0, 2, 3, 6], [2, 3, 4, 6], [0, 1, 5, 6], [1, 2, 3, 4, 5], [0, 2, 5], [3]]


def drawn(seed=0, size=0.4):
    rng = np.random.default_rng(seed)
    model = {name: rng.normal(size=shape) for name, shape in LAYOUT.shapes.items()}
    way = {name: 0.15 * rng.normal(size=shape) for name, shape in LAYOUT.shapes.items()}  # that all of them go
    moves = [
        {k: {name: way[name] + size * rng.normal(size=shape) for name, shape in LAYOUT.shapes.items()} for k in cohort}
        for cohort in COHORTS
    ]
    return {name: x.astype(np.float32) for name, x in model.items()}, moves


def play(method, model, moves):
    """Yields (server, up, starts, report) of every round; the cohort in two calls, the later clients first."""
    initial = {name: torch.tensor(x)[None] for name, x in model.items()}
    template = first_row(method, initial)
    kept = MemoryBank(template, len(COUNTS)) if template else None
    server = first_server(method, initial, len(COUNTS), kept)
    bank = MemoryBank(first_client(method, initial), len(COUNTS))
    for t, cohort in enumerate(moves):
        ids = torch.tensor(sorted(cohort))
        n = torch.tensor(COUNTS)[ids]
        ctx = context(7, t + 1, len(moves), ids, n, len(COUNTS), sum(COUNTS), len(ids), ~server.seen[ids])
        fold, starts = begin(method, server, ctx), {}
        for part in (ctx.at(slice(2, None)), ctx.at(slice(0, 2))):
            if not len(part.ids):
                continue

            def train(lesson, ctx, cohort=cohort, starts=starts):
                who = ctx.ids.tolist()
                starts |= {
                    k: {x: v[min(i, row_count({x: v}) - 1)].numpy() for x, v in lesson.start.items()}
                    for i, k in enumerate(who)
                }
                added = {x: np.stack([cohort[k][x] for k in who]).astype(np.float32) for x in lesson.start}
                after = {x: lesson.start[x] + torch.tensor(added[x]) for x in lesson.start}
                return Trained(after, lesson.memory, {"loss": torch.zeros(len(who))})

            down = outgoing(method, server, part)
            up, state = client(method, bank.read(part.ids), down, train, part)
            incoming(method, server, fold, down, up, part)
            bank.write(part.ids, state)
        server, report = settle(method, server, fold, ctx)
        yield server, starts, report


def assert_close(got, want, names=LAYOUT.shapes):
    for name in names:
        np.testing.assert_allclose(got[name], want[name], atol=1e-5, err_msg=name)


SEED_FORMS = {
    "fedsim": (fedsim, {}, ()),
    "literal": (fedsim, {"q": 0.0}, ()),
    "softmax": (fedsim, {"softmax": 0.3, "q": 0.5}, ()),
    "updates": (fedsim, {"on": "updates"}, ()),
    "pfedsim": (pfedsim, {}, HOME),
    "pfedsim updates": (pfedsim, {"on": "updates", "q": 2.0}, HOME),
}


@pytest.mark.parametrize(
    ("form", "at"),
    [(form, at) for form in SEED_FORMS for at in ("server", "client") if at == "server" or "updates" not in form],
)
def test_the_seed_form_is_the_formula(form, at):
    make, options, home = SEED_FORMS[form]
    model, moves = drawn()
    played = play(compose(LAYOUT, make(at=at, **options)), model, moves)
    for (server, starts, report), (want, cos, share, after) in zip(
        played, reference.seed_form(model, moves, COUNTS, home, **options), strict=True
    ):
        assert_close({name: x[0].numpy() for name, x in server.model.items()}, want)
        for k, start in starts.items():
            assert_close({x: start[x] + moves[server_round(after, moves)][k][x] for x in start}, after[k])
        assert report["avg_similarity"] == pytest.approx(np.mean(list(cos.values())), abs=1e-6)
        assert report["similarity_variance"] == pytest.approx(np.var(list(cos.values())), abs=1e-6)
        assert report["max_weight"] == pytest.approx(max(share.values()), abs=1e-6)
        assert report["min_weight"] == pytest.approx(min(share.values()), abs=1e-6)
        entropy = -sum(w * np.log(w) for w in share.values() if w)
        assert report["weight_entropy"] == pytest.approx(entropy, abs=1e-6)


def server_round(after, moves):
    """Which round these clients' models are of."""
    return next(t for t, cohort in enumerate(moves) if cohort.keys() == after.keys())


@pytest.mark.parametrize("size", [0.4, 1.5])
@pytest.mark.parametrize(("share", "warmup"), [(0.0, 0), (0.25, 2), (0.5, 4)])
def test_the_published_form_is_the_formula(share, warmup, size):
    model, moves = drawn(seed=3, size=size)
    method = compose(LAYOUT, pfedsim(mode="published", warmup=share))
    found = 0
    wanted = reference.published(model, moves, COUNTS, HOME, HEAD, warmup)
    for (server, starts, _), (want, similar, start) in zip(play(method, model, moves), wanted, strict=True):
        assert_close({name: x[0].numpy() for name, x in server.model.items()}, want)
        for k in start:
            assert_close(starts[k], start[k])
        state = under("0", server.blend)
        got = dict(zip(state["pairs"].tolist(), state["similarity"].tolist(), strict=True))
        alike = {i * len(COUNTS) + j: s for (i, j), s in similar.items() if s > 0}
        assert got == pytest.approx(alike, abs=1e-5)
        found += len(alike)
    assert found > 20
