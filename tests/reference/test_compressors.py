"""Every compressor over whole rounds against the NumPy reference; clients sit out, and uploads are lost."""

import numpy as np
import pytest
import torch

from reference import compressors as reference
from reference import drive, topk
from sparing.core.compose import compose
from sparing.core.keys import hashes
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout

SHAPES = {"a": (6, 5), "b": (7,), "one": (1,), "c": (8, 3, 2, 2)}
LAYOUT = Layout(SHAPES, dict.fromkeys(SHAPES, torch.float32))
COUNTS = [16, 10, 32, 8, 9, 31]
COHORTS = [[0, 1, 2], [2, 5], [0, 2, 3, 4], [0, 1, 2], [2, 5], [1, 3, 4, 5]]
LOST = {(1, 5), (3, 0)}
MODEL = {name: torch.zeros(1, *shape) for name, shape in SHAPES.items()}
PLAIN = {name: np.zeros(shape) for name, shape in SHAPES.items()}


def moves(seed=3):
    rng = np.random.default_rng(seed)
    scale = {name: 10.0**-i for i, name in enumerate(SHAPES)}
    return [
        {k: {n: scale[n] * rng.normal(size=s).astype(np.float32).astype(float) for n, s in SHAPES.items()} for k in ids}
        for ids in COHORTS
    ]


def played(name, lost=(), **options):
    return drive.play(compose(LAYOUT, find_recipe(name).make(**options)), MODEL, moves(), COUNTS, lost=lost)


def same(rounds, history, tolerance=2e-6):
    for got, wanted in zip(rounds, history, strict=True):
        for name, x in wanted.items():
            size = max(np.abs(x).max(), np.abs(moves()[0][0][name]).max())
            np.testing.assert_allclose(got.server.model[name][0].numpy(), x, atol=tolerance * size, err_msg=name)


def draws(rounds, t, k, name, tag="round"):
    ctx = rounds[t].ctx
    row = ctx.ids.tolist().index(k)
    n = int(np.prod(SHAPES[name]))
    return ctx.at(slice(row, row + 1)).uniform(f"{tag}/{name}", n)[0].double().numpy().reshape(SHAPES[name])


def flips(rounds, t, k, name):
    ctx = rounds[t].ctx
    row = ctx.ids.tolist().index(k)
    n = int(np.prod(SHAPES[name]))
    d = 1 << (n - 1).bit_length()
    words = hashes(ctx.at(slice(row, row + 1)).keys(f"eden/{name}"), d)[0].numpy()
    return np.where([words < 0, (words >> 62) & 1 == 1], -1.0, 1.0)


LEVELS = {bits: reference.normal_levels(bits) for bits in (1, 2, 3, 4)}
STATELESS = {
    "int4": ({}, lambda r, t, k, name, x: reference.nearest(x, 4)),
    "qsgd": ({"levels": 9}, lambda r, t, k, name, x: reference.qsgd(x, 9, draws(r, t, k, name))),
    "ternary": ({}, lambda r, t, k, name, x: reference.terngrad(x, draws(r, t, k, name))),
    "sign": ({}, lambda r, t, k, name, x: reference.scaled_sign(x)),
    "eden": ({}, lambda r, t, k, name, x: reference.eden(x, flips(r, t, k, name), LEVELS[1])),
}


@pytest.mark.parametrize("name", STATELESS)
def test_rounds_are_the_formula(name):
    options, compress = STATELESS[name]
    rounds, _ = played(name, LOST, **options)

    def send(t, k, u):
        return {x: compress(rounds, t, k, x, u[x]) for x in u}

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send, lost=LOST))


def test_stochastic_int4_is_the_formula():
    rounds, _ = played("int4", stochastic=True)

    def send(t, k, u):
        return {n: reference.stepped(x, 7, np.abs(x).max(), draws(rounds, t, k, n)) for n, x in u.items()}

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send))


def test_qsgd_in_buckets_is_qsgd_on_each():
    rounds, _ = played("qsgd", levels=5, bucket=4)

    def send(t, k, u):
        out = {}
        for n, x in u.items():
            flat, draw = x.ravel(), draws(rounds, t, k, n).ravel()
            parts = [reference.qsgd(flat[i : i + 4], 5, draw[i : i + 4]) for i in range(0, flat.size, 4)]
            out[n] = np.concatenate(parts).reshape(x.shape)
        return out

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send))


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_eden_with_more_bits_and_either_scale_is_the_formula(bits, unbiased):
    rounds, _ = played("eden", bits=bits, unbiased=unbiased)

    def send(t, k, u):
        return {n: reference.eden(x, flips(rounds, t, k, n), LEVELS[bits], unbiased) for n, x in u.items()}

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send))


def put_back(residual, sent, lost, t, k):
    if (t, k) in lost:
        for name, x in sent.items():
            residual[k, name] = residual[k, name] + x


@pytest.mark.parametrize(
    ("name", "options", "compress"),
    [
        ("drop", {"ratio": 0.3}, lambda x: np.where(topk.above_quantile(x, 0.3), x, 0)),
        ("sign", {"memory": True}, reference.scaled_sign),
        ("stc", {"ratio": 0.2, "down": False}, lambda x: reference.sparse_ternary(x, 0.2)),
    ],
)
def test_rounds_with_memory_are_the_formula(name, options, compress):
    rounds, states = played(name, LOST, **options)
    remembered, residual = reference.with_memory(lambda t, k, n, x: compress(x))

    def send(t, k, u):
        sent = remembered(t, k, u)
        put_back(residual, sent, LOST, t, k)
        return sent

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send, lost=LOST))
    for (k, n), x in residual.items():
        np.testing.assert_allclose(states[k][f"up/residual/{n}"][0].numpy(), x, rtol=1e-4, atol=1e-5)


def test_drop_over_the_model_has_one_threshold():
    rounds, _ = played("drop", ratio=0.3, over="model")
    residual = {}

    def send(t, k, u):
        wanted = {n: x + residual.get((k, n), 0) for n, x in u.items()}
        cut = np.quantile(np.abs(np.concatenate([x.ravel() for x in wanted.values()])), 0.7)
        sent = {n: np.where(np.abs(x) >= cut, x, 0) for n, x in wanted.items()}
        residual.update({(k, n): wanted[n] - sent[n] for n in u})
        return sent

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send))


def test_stc_compresses_the_servers_update_as_well_with_a_residual_of_its_own():
    rounds, _ = played("stc", LOST, ratio=0.2)
    remembered, residual = reference.with_memory(lambda t, k, n, x: reference.sparse_ternary(x, 0.2))
    downstream, kept = reference.with_memory(lambda t, k, n, x: reference.sparse_ternary(x, 0.2))

    def send(t, k, u):
        sent = remembered(t, k, u)
        put_back(residual, sent, LOST, t, k)
        return sent

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send, lambda t, step, here: downstream(t, "s", step), LOST))
    for name, shape in SHAPES.items():
        np.testing.assert_allclose(
            rounds[-1].server.past[f"memory/residual/{name}"][0].numpy(), kept["s", name], rtol=1e-4, atol=1e-5
        )
        before = rounds[-2].server.model[name] - rounds[-3].server.model[name]
        assert int((before != 0).sum()) <= topk.count(0.2, int(np.prod(shape))), "the model moves where it is told to"


def test_a_broadcast_is_the_servers_update_through_its_own_compressor():
    """Clients send int4, the server its largest entries after momentum, and keeps what it left out."""
    made = find_recipe("broadcast").make(by=[find_recipe("topk").make(ratio=0.3)])
    recipes = (made, find_recipe("int4").make(), find_recipe("fedavgm").make(beta=0.5))
    rounds, _ = drive.play(compose(LAYOUT, *recipes), MODEL, moves(), COUNTS, lost=LOST)
    velocity = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    downstream, kept = reference.with_memory(lambda t, k, n, x: np.where(topk.largest(x, 0.3), x, 0))

    def after(t, step, here):
        for name, x in step.items():
            velocity[name] = 0.5 * velocity[name] + x
        return downstream(t, "s", dict(velocity))

    def send(t, k, u):
        return {name: reference.nearest(x, 4) for name, x in u.items()}

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send, after, LOST))
    assert len(kept) == len(SHAPES)


def fresh(rounds, t, k, name, rank):
    ctx = rounds[t].ctx
    row = ctx.ids.tolist().index(k)
    n = int(np.prod(SHAPES[name][1:]))
    return (
        ctx.at(slice(row, row + 1)).uniform(f"powersgd/{name}", n * rank)[0].double().numpy().reshape(n, rank) * 2 - 1
    )


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("rank", [1, 2])
def test_powersgd_rounds_are_the_formula(rank, memory):
    rounds, _ = played("powersgd", LOST if memory else (), rank=rank, memory=memory)
    factors = {}

    def compress(t, k, name, x):
        m, n = x.shape[0], x.size // x.shape[0]
        if x.ndim < 2 or rank * (m + n) >= m * n:
            return x
        start = factors[k, name] if (k, name) in factors else fresh(rounds, t, k, name, rank)
        out, factors[k, name] = reference.low_rank(x, start)
        return out

    remembered, residual = reference.with_memory(compress)

    def send(t, k, u):
        if not memory:
            return {n: compress(t, k, n, x) for n, x in u.items()}
        sent = remembered(t, k, u)
        put_back(residual, sent, LOST, t, k)
        return sent

    same(rounds, reference.play(PLAIN, moves(), COUNTS, send, lost=LOST if memory else ()), 2e-5)
    assert len(factors) > 0


def test_ef21_rounds_are_the_formula():
    rounds, states = played("ef21", LOST, ratio=0.2)
    wanted = reference.Ef21(COUNTS, lambda x: np.where(topk.largest(x, 0.2), x, 0), LOST)
    same(rounds, reference.play(PLAIN, moves(), COUNTS, wanted.send, wanted.server, LOST))
    for k, tree in wanted.g.items():
        for name, x in tree.items():
            np.testing.assert_allclose(states[k][f"up/estimate/{name}"][0].numpy(), x, rtol=1e-4, atol=1e-5)
    for name in SHAPES:
        mean = sum(COUNTS[k] / sum(COUNTS) * wanted.g[k][name] for k in wanted.g)
        np.testing.assert_allclose(rounds[-1].server.blend[f"0/{name}"][0].numpy(), mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"clip": 0.7}, {"momentum": 0.0}, {"warmup": 3}])
def test_dgc_rounds_are_the_formula(options):
    rounds, states = played("dgc", LOST, ratio=0.1, **options)
    warm = options.get("warmup", 0)

    def choose(t, x):
        share = 0.1 if t + 1 > warm else 0.1 ** ((t + 1) / (warm + 1))
        return topk.largest(x, share)

    wanted = reference.Dgc(choose, options.get("momentum", 0.9), options.get("clip"), LOST)
    send = lambda t, k, u: wanted.send(t, k, u, len(COHORTS[t]))  # noqa: E731
    same(rounds, reference.play(PLAIN, moves(), COUNTS, send, lost=LOST))
    for k, tree in wanted.v.items():
        for name, x in tree.items():
            np.testing.assert_allclose(states[k][f"up/unsent/{name}"][0].numpy(), x, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(states[k][f"up/velocity/{name}"][0].numpy(), wanted.u[k][name], atol=1e-5)


@pytest.mark.parametrize("over", ["layer", "model"])
def test_pruned_rounds_are_fedavg_on_what_is_left(over):
    rng = np.random.default_rng(5)
    model = {n: rng.normal(size=s).astype(np.float32).astype(float) for n, s in SHAPES.items()}
    weights = [n for n in SHAPES if len(SHAPES[n]) > 1]
    if over == "layer":
        masks = {n: topk.largest(model[n], 0.3) for n in weights}
    else:
        masks = topk.over_model({n: model[n] for n in weights}, 0.3)
    left = {n: np.where(masks[n], x, 0) if n in masks else x for n, x in model.items()}
    method = compose(LAYOUT, find_recipe("prune").make(keep=0.3, over=over))
    start = {n: torch.tensor(x, dtype=torch.float32)[None] for n, x in model.items()}
    rounds, _ = drive.play(method, start, moves(), COUNTS)

    def send(t, k, u):
        return {n: np.where(masks[n], x, 0) if n in masks else x for n, x in u.items()}

    same(rounds, reference.play(left, moves(), COUNTS, send))
    for n, mask in masks.items():
        assert not rounds[-1].server.model[n][0].numpy()[~mask].any()
        assert np.array_equal(rounds[0].down.leaves[n].scope[0].numpy(), mask)
