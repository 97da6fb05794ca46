"""Whole rounds of FedHM by the library against NumPy, with clients that really descend on their factors."""

import numpy as np
import pytest
import torch
from torch import nn

from reference import fedhm as reference
from sparing.core.compose import compose
from sparing.core.method import Trained
from sparing.core.round import begin, client, first_server, incoming, outgoing, settle
from sparing.core.tree import layout_of, tree_of
from sparing.engines.engine import chunks_of_size
from sparing.parts.factors import (
    FactoredConv,
    along_factors,
    factor_pace,
    factor_product,
    matrix_as_layer_weight,
    matrix_of,
)
from sparing.recipes.fedhm import fedhm
from sparing.train.optim import frobenius
from support import make_ctx

CLIENTS, LR, STEPS, DECAY = 8, 0.05, 3, 0.1
THIN = ("middle.weight", "dense.weight")
COHORTS = [[0, 1, 2, 3], [1, 2, 5], [4, 6, 7], [3, 7], [2]]
SAMPLES = [10, 25, 7, 40, 12, 33, 18, 5]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, bias=False)
        self.middle = nn.Conv2d(6, 8, (3, 2))
        self.dense = nn.Linear(9, 7)
        self.head = nn.Linear(7, 3)


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


def pulling(targets):
    """Gradient descent to each client's target; the decay of factors is the library's own."""

    def train(lesson, ctx):
        k = len(ctx.ids)
        now = {name: x.expand(k, *x.shape[1:]).clone() for name, x in lesson.start.items()}
        want = {name: torch.stack([targets[i][name] for i in ctx.ids.tolist()]) for name in targets[0]}
        for _ in range(STEPS):
            for name, x in dict(now).items():
                if name in want:
                    now[name] = x - LR * (x - want[name])
                elif name.endswith(".a"):
                    other = f"{name[:-1]}b"
                    with torch.enable_grad():
                        pair = [now[part].clone().requires_grad_() for part in (name, other)]
                        off = torch.einsum("kmr...,krn...->kmn...", *full_rank(pair)) - want[f"{name[:-1]}weight"]
                        grads = torch.autograd.grad(off.square().sum() / 2, pair)
                    slow = along_factors(factor_pace(now[name], now[other]), now[name])
                    grads = [g * part for g, part in zip(grads, slow, strict=True)]
                    grads = frobenius(list(grads), [now[name], now[other]], [(0, 1)], DECAY)
                    now[name], now[other] = now[name] - LR * grads[0], now[other] - LR * grads[1]
        return Trained(now, lesson.memory, {"loss": torch.zeros(k)})

    return train


def full_rank(pair):
    """Both factors over the same trailing axes, so that one einsum multiplies them."""
    a, b = pair
    if a.ndim == 3:
        return a, b
    return a.expand(*a.shape[:-1], b.shape[-1]), b.expand(*b.shape[:3], a.shape[3], b.shape[-1])


def play(model, targets, options):
    method = compose(layout_of(net()), fedhm(decay=0.0, **options))
    server, reports = first_server(method, model, CLIENTS), []
    for t, ids in enumerate(COHORTS, 1):
        cohort = make_ctx(ids, [SAMPLES[k] for k in ids], t=t, clients=CLIENTS)
        fold = begin(method, server, cohort)
        for ctx in chunks_of_size(cohort, 2, method.fit):
            down = outgoing(method, server, ctx)
            up, _ = client(method, {}, down, pulling(targets), ctx)
            incoming(method, server, fold, down, up, ctx)
        server, report = settle(method, server, fold, cohort)
        reports.append(report)
    return server, reports


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weighting": "factor", "temperature": 2.0},
        {"weighting": "uniform", "ratios": (0.5, 1, 0.25)},
        {"weighting": "samples"},
        {"weighting": "ratio", "temperature": 0.2, "ratios": (0.25, 0.6)},
    ],
    ids=str,
)
@pytest.mark.parametrize("blend", ["products", "increments", "partitioned"])
def test_rounds_agree_with_the_reference(options, blend):
    model = tree_of(net())
    rng = np.random.default_rng(1)
    targets = [{name: rng.normal(size=x.shape[1:]) for name, x in model.items()} for _ in range(CLIENTS)]
    asked = {"ratios": (1, 0.5, 0.25, 0.125), "weighting": "ratio", "temperature": 1.0} | options
    want = reference.play(
        {name: x[0].numpy() for name, x in model.items()},
        THIN, COHORTS, targets, SAMPLES, asked["ratios"], lambda k: k % len(asked["ratios"]),
        asked["weighting"], asked["temperature"], LR, STEPS, DECAY, blend,
    )  # fmt: skip
    server, reports = play(
        model, [{n: torch.tensor(x) for n, x in one.items()} for one in targets], options | {"blend": blend}
    )
    for name, x in want.items():
        assert np.allclose(server.model[name][0].numpy(), x, rtol=1e-6, atol=1e-7), name
    if blend == "products":
        joined = [report["history"] > 0 for report in reports]
        top = asked["ratios"].index(max(asked["ratios"]))
        assert joined == [all(k % len(asked["ratios"]) != top for k in ids) for ids in COHORTS]
        assert any(joined), "the history rule was at work"
    least = min(asked["ratios"])
    for name in THIN:
        true = reference.relative_error(want[name], reference.rank(want[name].shape, least))
        assert reports[-1][f"approximation/{name[:-7]}"] == pytest.approx(true, abs=1e-5)


def test_the_matrix_of_a_convolution():
    w = np.random.default_rng(0).normal(size=(4, 3, 2, 5))
    assert np.array_equal(matrix_of(torch.tensor(w)[None])[0].numpy(), reference.matrix(w))
    assert np.array_equal(matrix_as_layer_weight(torch.tensor(reference.matrix(w))[None], w.shape)[0].numpy(), w)
    assert not np.array_equal(reference.matrix(w), w.reshape(8, 15)), "a plain view is something else"


def test_product_of_factors():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 4, 3, 2, 1)), rng.normal(size=(2, 3, 5, 1, 6))
    whole = factor_product(torch.tensor(a), torch.tensor(b)).numpy()
    for k in range(2):
        tall = np.concatenate([a[k, i, :, :, 0].T for i in range(4)])
        assert np.allclose(whole[k], reference.weight(tall @ b[k].reshape(3, 30), (4, 5, 2, 6)), atol=1e-14)


@pytest.mark.parametrize("how", [(1, 1, 0, 0, 1, 1), (2, 1, 1, 0, 1, 2), (1, 3, 0, 2, 2, 1)], ids=str)
def test_a_factored_convolution_is_the_looped_convolution_of_the_truncated_weight(how):
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, 9, 10)), rng.normal(size=(5, 3, 3, 2))
    stride, padding, dilation = how[:2], how[2:4], how[4:]
    layer = nn.Conv2d(3, 5, (3, 2), stride, padding, dilation, bias=False).double()
    thin, (a, b) = FactoredConv(layer, 2), reference.factors(w, 2)
    with torch.no_grad():
        thin.a.copy_(torch.tensor(a.reshape(5, 3, 2).transpose(0, 2, 1)[..., None]))
        thin.b.copy_(torch.tensor(b.reshape(2, 3, 1, 2)))
        got = thin(torch.tensor(x)[None])[0].numpy()
    want = reference.conv(x, reference.weight(a @ b, w.shape), stride, padding, dilation)
    assert np.abs(got - want).max() < 1e-12
