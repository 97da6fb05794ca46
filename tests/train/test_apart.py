"""Local training of several networks in one: each trains as it would alone, whatever stands beside it."""

import pytest
import torch
from torch import nn

from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.data.clients import Clients
from sparing.parts.size.mixture import Mix
from sparing.train.local import train
from sparing.train.losses import cross_entropy
from support import make_ctx

K, BASES = 3, 4


def net():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


def rows(seed, scale=1.0):
    """Of every tensor of the mix: `[K, BASES, *shape]`."""
    g = torch.Generator().manual_seed(seed)
    state = net().state_dict()
    some = {name: torch.rand(K, BASES, *x.shape, generator=g) * scale for name, x in state.items()}
    return {f"net.{name}": x if state[name].is_floating_point() else x.long() for name, x in some.items()}


def of(tree, i):
    """Those of one base, `[K, *shape]`."""
    return {name.replace("net.", ""): x[:, i].clone() for name, x in tree.items()}


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
def test_every_base_trains_as_if_alone(path):
    g = torch.Generator().manual_seed(0)
    data = Clients.of([(torch.rand(n, 6, generator=g), torch.arange(n) % 3) for n in (7, 12, 20)])
    ctx = make_ctx([0, 1, 2], [7, 12, 20])
    phase = Phase(epochs=2, batch=5, optimiser=Optimiser(lr=0.1, momentum=0.9, clip=0.3), prox=0.2, correct=True)
    start, anchor, pull = rows(1), rows(2), rows(3, 0.01)
    pull = {name: x for name, x in pull.items() if "num_batches" not in name}
    memory = {f"velocity/{name}": x for name, x in rows(4, 0.1).items() if name.endswith(("weight", "bias"))}
    was = {name: x.clone() for name, x in memory.items()}
    model = Mix([net() for _ in range(BASES)])
    after, notes = train(model, cross_entropy, data, Local((phase,)), start, ctx, path, memory, anchor, pull)
    losses = []
    for i in range(BASES):
        mine = {name.replace("net.", ""): x[:, i].clone() for name, x in was.items()}
        how = (ctx, path, mine, of(anchor, i), of(pull, i))
        alone, said = train(net(), cross_entropy, data, Local((phase,)), of(start, i), *how)
        losses.append(said["loss"])
        for name, x in alone.items():
            got = after[f"net.{name}"][:, i]
            assert torch.equal(got, x) if path.startswith("loop") else torch.allclose(got, x, atol=1e-5), name
        for name, x in mine.items():
            assert torch.allclose(memory[name.replace("/", "/net.")][:, i], x, atol=1e-5)
            assert not torch.equal(x, was[name.replace("/", "/net.")][:, i])
    assert torch.allclose(notes["loss"], torch.stack(losses).mean(0), atol=1e-6)


def test_one_start_serves_all_clients():
    data = Clients.of([(torch.eye(6), torch.arange(6) % 3)] * K)
    start = {name: x[:1] for name, x in rows(1).items()}
    local = Local((Phase(epochs=1, batch=3),))
    model = Mix([net() for _ in range(BASES)])
    after, notes = train(model, cross_entropy, data, local, start, make_ctx([0, 1, 2], [6, 6, 6]))
    assert notes["loss"].shape == (K,)
    assert all(x.shape[:2] == (K, BASES) for x in after.values())


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked"])
def test_dropout_is_drawn_for_every_base_apart_and_for_the_first_as_if_alone(path):
    g = torch.Generator().manual_seed(0)
    x, y = torch.rand(8, 64, generator=g), torch.arange(8) % 4
    base = nn.Sequential(nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    mix, data = Mix([base] * 3), Clients.of([(x, y)] * 2)
    start = {name: w[None] for name, w in mix.state_dict().items()}
    how = (cross_entropy, data, Local((Phase(steps=1, batch=8, optimiser=Optimiser(lr=0.1)),)))
    after, _ = train(mix, *how, start, make_ctx([0, 1]), path)
    heads = after["net.2.weight"].flatten(0, 1)
    assert all(not torch.allclose(heads[i], heads[j], atol=1e-4) for i in range(6) for j in range(i))
    one, _ = train(mix, *how, start, make_ctx([1]), path)
    assert all(torch.allclose(one[name][0], w[1], atol=1e-6) for name, w in after.items())
    alone, _ = train(mix.alone(), *how, {name: w[:, 0] for name, w in start.items()}, make_ctx([1]), path)
    assert all(torch.allclose(w[0], after[name][1, 0], atol=1e-6) for name, w in alone.items())
