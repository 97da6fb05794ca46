"""Whole rounds of HeteroFL by the library against NumPy: real training, and whatever a client might send back."""

import itertools
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

import sparing
from reference import heterofl as reference
from sparing.core.compose import compose
from sparing.core.method import Trained
from sparing.core.round import begin, client, first_server, incoming, outgoing, settle
from sparing.core.tree import layout_of, tree_of
from sparing.engines.engine import chunks_of_size
from sparing.recipes.heterofl import heterofl
from support import make_ctx

CLIENTS = 7
SAMPLES = [10, 25, 7, 40, 12, 33, 18]


def dense(widths):
    """Layers 0, 1, 2 ... with ReLU between them, in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[tuple[str, nn.Module]] = []
        for i, (a, b) in enumerate(itertools.pairwise(widths)):
            layers += [(str(i), nn.Linear(a, b)), (f"relu{i}", nn.ReLU())]
        return nn.Sequential(OrderedDict(layers[:-1])).double()


@pytest.mark.parametrize("scaler", [True, False])
@pytest.mark.parametrize("ratios", [(1, 0.5, 0.25), (0.3, 0.7), (0.125, 0.5)], ids=str)
def test_training_agrees_with_the_reference(ratios, scaler):
    widths, rng = (6, 11, 9, 4), np.random.default_rng(2)
    data = [(rng.normal(size=(n, 6)), rng.integers(0, 4, n)) for n in SAMPLES]
    net = dense(widths)
    first = {name: x.detach().numpy().copy() for name, x in net.state_dict().items()}
    layers = [(b, a, 1) for a, b in itertools.pairwise(widths)]
    want = reference.play(first, layers, data, ratios, rounds=3, lr=0.3, steps=4, scaler=scaler)
    result = sparing.run(
        sparing.Task(lambda: dense(widths), train=[(torch.tensor(x), torch.tensor(y)) for x, y in data]),
        [{"heterofl": {"ratios": list(ratios), "scaler": scaler}}],
        rounds=3,
        sample=1.0,
        local={"steps": 4, "batch": max(SAMPLES), "lr": 0.3},
        plan={"path": "loop"},
    )
    assert all(np.abs(want[name] - first[name]).max() > 1e-3 for name in want)
    for name, x in want.items():
        assert np.abs(result.model[name].numpy() - x).max() < 1e-7, name


def folded():
    """A convolution, one more, and a dense layer over the flattened 2x3 places of its 6 channels."""
    layers = OrderedDict({"0": nn.Conv2d(2, 5, 3), "1": nn.Conv2d(5, 6, (3, 2)), "flat": nn.Flatten()})
    return nn.Sequential(OrderedDict({**layers, "2": nn.Linear(36, 7), "3": nn.Linear(7, 3)})).double()


LAYERS = [(5, 2, 1), (6, 5, 1), (7, 6, 6), (3, 7, 1)]
COHORTS = [[0, 1, 2, 3], [1, 2, 5], [4, 6], [6], [3, 4, 5, 6]]


def moved(full, k, t):
    """What client k would make of the whole tensor in round t: anything, as long as both sides know it."""
    return np.sin(full * 3 + k) + t / 10


def train(lesson, ctx):
    after = {
        name: torch.stack([torch.tensor(moved(x[0].numpy(), k, ctx.round)) for k in ctx.ids.tolist()])
        for name, x in lesson.start.items()
    }
    return Trained(after, lesson.memory, {"loss": torch.zeros(len(ctx.ids))})


@pytest.mark.parametrize("ratios", [(1, 0.5, 0.25), (0.2, 0.6), (0.5,)], ids=str)
def test_places_and_means_agree_with_the_reference(ratios):
    net = folded()
    want = {name: x[0].numpy().copy() for name, x in tree_of(net).items()}
    method = compose(layout_of(net), heterofl(ratios))
    server = first_server(method, tree_of(net), CLIENTS)
    for t, ids in enumerate(COHORTS, 1):
        clients = []
        for k in ids:
            mine = reference.cut(want, reference.places(LAYERS, ratios[k % len(ratios)]))
            clients.append({name: (index, moved(values, k, t)) for name, (index, values) in mine.items()})
        want = reference.averaged(want, clients, [SAMPLES[k] for k in ids])

        cohort = make_ctx(ids, [SAMPLES[k] for k in ids], t=t, clients=CLIENTS)
        fold = begin(method, server, cohort)
        for ctx in chunks_of_size(cohort, 2, method.fit):
            down = outgoing(method, server, ctx)
            up, _ = client(method, {}, down, train, ctx)
            incoming(method, server, fold, down, up, ctx)
        server, _ = settle(method, server, fold, cohort)
        for name, x in want.items():
            assert np.abs(server.model[name][0].numpy() - x).max() < 1e-7, (name, t)
