"""The library's rounds of partial sharing against the NumPy ones, in float64."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from reference import psfed as reference
from sparing.core.compose import compose
from sparing.core.method import Trained
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, settle
from sparing.core.tree import Layout, expand_rows, flat, take_rows
from sparing.engines.divergence import Divergence
from sparing.parts.share.schedule import shared_counts
from sparing.recipes.psfed import psfed
from sparing.train.gradient import gradient_at
from sparing.train.losses import squared_error
from support import changed, make_ctx, numbers, random_tree

SHAPES = {"a.weight": (6, 5), "a.bias": (5,), "b.weight": (7, 3), "c.weight": (40,)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float64))
MODEL = {name: x.double() for name, x in random_tree(LAYOUT, 1, seed=3).items()}
D, CLIENTS, ROUNDS = LAYOUT.size, 6, 6
SIZES = [35, 21, 40]
TARGET = np.random.default_rng(1).normal(size=(CLIENTS, D))


def one_row(tree, names=LAYOUT.params):
    return torch.cat([flat(tree[name]) for name in names], dim=1)


def training(lesson, ctx):
    """A pull towards the client's own optimum, as SGD on a quadratic loss would."""
    x = one_row(lesson.start).expand(len(ctx.ids), -1)
    after = x + 0.3 * (torch.from_numpy(TARGET)[ctx.ids] - x)
    parts = after.split([len(flat(torch.zeros(1, *s))[0]) for s in SHAPES.values()], dim=1)
    tree = {n: part.reshape(-1, *s) for (n, s), part in zip(SHAPES.items(), parts, strict=True)}
    return Trained(tree, lesson.memory, {"loss": torch.zeros(len(ctx.ids))})


def play(gradient=None, **options):
    """Rounds of the library: (ctx, server before, models at start, server after, report) of each, cohorts of four."""
    method = compose(LAYOUT, psfed(**options))
    server = first_server(method, MODEL, CLIENTS, gradient=gradient)
    bank = expand_rows(first_client(method, MODEL), CLIENTS)
    bank = {name: x.clone() for name, x in bank.items()}
    for t in range(1, ROUNDS + 1):
        ids = sorted({(t + i * i) % CLIENTS for i in range(4)})
        ctx = make_ctx(ids, t=t, clients=CLIENTS)
        ctx = changed(ctx, first=~server.seen[ctx.ids])
        seen, stale = [], Divergence(method, server.model)

        def watched(lesson, ctx, seen=seen):
            seen.append(one_row(lesson.start).expand(len(ctx.ids), -1).numpy())
            return training(lesson, ctx)

        fold, down = begin(method, server, ctx), outgoing(method, server, ctx)
        up, state = client(stale.watching(method), take_rows(bank, ctx.ids), down, watched, ctx)
        for name, x in state.items():
            bank[name][ctx.ids] = x
        incoming(method, server, fold, down, up, ctx)
        before, (server, report) = server, settle(method, server, fold, ctx, gradient)
        yield method, ctx, before, seen[0], server, numbers(report) | numbers(stale.report())


def pull(start, k):
    return start + 0.3 * (TARGET[k] - start)


def uniform_masks(method, ctx):
    """What the library drew, for the selectors that draw."""
    return one_row({name: cut.mask for name, cut in method.share.up({}, ctx).items()}).expand(len(ctx.ids), -1).numpy()


def compare(masks_of, **options):
    truth = reference.Federation(one_row(MODEL)[0].numpy(), CLIENTS)
    download = options.get("first") != "seed"
    checked = 0
    for method, ctx, _, starts, after, report in play(**options):
        masks = masks_of(truth, method, ctx)
        wanted = truth.round(ctx.ids.tolist(), ctx.n.tolist(), masks, pull, download)
        assert np.allclose(starts, wanted, rtol=0, atol=1e-8)
        assert np.allclose(one_row(after.model)[0].numpy(), truth.theta, rtol=0, atol=1e-8)
        assert report["coverage"] == pytest.approx(masks.any(0).mean())
        assert report["mask_count"] == masks[0].sum()
        assert report["stale_divergence"] == pytest.approx(reference.divergence(wanted), abs=1e-9)
        checked += 1
    assert checked == ROUNDS


@pytest.mark.parametrize("first", ["download", "seed"])
@pytest.mark.parametrize("per_client", [False, True])
@pytest.mark.parametrize("selector", ["random", "fixed"])
def test_drawn_masks(selector, per_client, first):
    compare(
        lambda truth, method, ctx: uniform_masks(method, ctx),
        selector=selector,
        per_client=per_client,
        first=first,
        fraction=0.3,
    )


def test_magnitude():
    def masks_of(truth, method, ctx):
        return np.tile(reference.largest(np.abs(truth.theta), reference.how_many(0.4, D)), (len(ctx.ids), 1))

    compare(masks_of, selector="magnitude", fraction=0.4, first="seed")


def test_gradient_score():
    """The first round shares everything, so that no two scores are equal."""

    def masks_of(truth, method, ctx):
        k = D if ctx.round == 1 else reference.how_many(0.4, D)
        return np.tile(reference.largest(truth.score, k), (len(ctx.ids), 1))

    options = {"start": 1.0, "warmup": 1, "schedule": "step", "explore": 0.0}
    compare(masks_of, selector="gradient", fraction=0.4, first="seed", **options)


class Regression(nn.Module):
    """All parameters, in a row, are the weights of one linear model."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Module(), nn.Module(), nn.Module()
        for name, shape in SHAPES.items():
            layer, _, leaf = name.partition(".")
            self.get_submodule(layer).register_parameter(leaf, nn.Parameter(torch.zeros(shape).double()))

    def forward(self, x):
        return x @ torch.cat([p.flatten() for p in self.parameters()])


@pytest.mark.parametrize("samples", [30, 1300])
def test_gradient_on_a_probe_set(samples):
    """From the first round on, the score is the gradient at the model of that round."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(samples, D)), rng.normal(size=samples)
    net, probe = Regression(), (torch.from_numpy(x), torch.from_numpy(y))
    assert list(net.state_dict()) == list(SHAPES)
    seen = []

    def masks_of(truth, method, ctx):
        score = np.abs(reference.slope(truth.theta, x, y))
        seen.append(reference.largest(score, reference.how_many(0.4, D)))
        return np.tile(seen[-1], (len(ctx.ids), 1))

    compare(
        masks_of,
        gradient=lambda model: gradient_at(net, squared_error, model, *probe),
        selector="gradient",
        source="probe",
        explore=0.0,
        fraction=0.4,
        first="seed",
    )
    assert any((a != b).any() for a, b in itertools.pairwise(seen)), "masks follow the model"


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8])
def test_layers_in_turn(fraction):
    turns = reference.layers_in_turn(SIZES, reference.how_many(fraction, D), ROUNDS)

    def masks_of(truth, method, ctx):
        mask = np.concatenate([np.full(n, i in turns[ctx.round - 1]) for i, n in enumerate(SIZES)])
        return np.tile(mask, (len(ctx.ids), 1))

    compare(masks_of, selector="layers", fraction=fraction)


def test_full_sync_every_third_round():
    def masks_of(truth, method, ctx):
        return np.ones((len(ctx.ids), D), bool) if ctx.round % 3 == 0 else uniform_masks(method, ctx)

    compare(masks_of, fraction=0.3, sync=3)


@pytest.mark.parametrize("how", ["union", "intersection"])
def test_a_drawn_mask_joined_with_magnitude(how):
    def masks_of(truth, method, ctx):
        drawn = uniform_masks(compose(LAYOUT, psfed(fraction=0.4)), ctx)
        top = reference.largest(np.abs(truth.theta), reference.how_many(0.4, D))
        return drawn | top if how == "union" else drawn & top

    compare(masks_of, selector={how: ["random", "magnitude"]}, fraction=0.4, first="seed")


@pytest.mark.parametrize("schedule", ["linear", "cosine", "step"])
@pytest.mark.parametrize(("start", "p"), [(0.1, 0.5), (1.0, 0.25), (0.0, 1.0)])
def test_schedules(schedule, start, p):
    count = shared_counts(10_007, p, start, 7, schedule)
    for t in range(1, 12):
        assert count(t) == reference.how_many(reference.fraction(t, p, start, 7, schedule), 10_007)
