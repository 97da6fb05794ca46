"""Randomness belongs to the client: dropout, shuffling, and whatever else a model draws."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparing.core.context import Ctx, context
from sparing.core.errors import ConfigError
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import take_rows, tree_of, tree_sha256
from sparing.data.clients import Clients
from sparing.train.keyed_layers import KeyedStep, dropout_keys, hook_keyed_layers
from sparing.train.local import train
from sparing.train.losses import cross_entropy
from support import make_ctx

LOCAL = Local((Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.1)),))


class Functional(nn.Module):
    """Draws from torch's own generator, where no swap of layers can reach."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(F.dropout(self.inner(x).relu(), 0.5, self.training))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTM(1, 4, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.cell(x[..., None])[0][:, -1])


def dropping() -> nn.Module:
    drop = nn.Dropout(0.4)  # used twice: two different masks
    return nn.Sequential(nn.Linear(6, 16), drop, nn.ReLU(), nn.Linear(16, 16), drop, nn.Linear(16, 3))


def dropping_channels() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.Dropout2d(0.5),
        nn.Flatten(),
        nn.Linear(8, 3),
        nn.Dropout(0.1),
    )


def built(make) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return make()


def cohort(sizes) -> Clients:
    g = torch.Generator().manual_seed(0)
    return Clients.of([(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in sizes])


def round_of(ids, data, seed=5, round=2) -> Ctx:
    ids = torch.tensor(ids)
    return context(seed=seed, round=round, rounds=9, ids=ids, n=data.count[ids], clients=len(data), samples=len(data.y))


def numpy_state() -> str:
    return repr(np.random.get_state())  # noqa: NPY002


def close(a, b, tolerance=1e-5):
    return all(torch.allclose(a[name], b[name], rtol=tolerance, atol=tolerance) for name in b)


@pytest.mark.parametrize("make", [dropping, dropping_channels])
def test_dropout_is_the_same_in_both_paths(make):
    model, data = built(make), cohort([5, 20, 1, 33])
    ctx, start = round_of([3, 0, 2, 1], data), tree_of(model)
    looped, _ = train(model, cross_entropy, data, LOCAL, start, ctx)
    stacked, _ = train(model, cross_entropy, data, LOCAL, start, ctx, path="stacked")
    assert close(stacked, looped)
    other, _ = train(model, cross_entropy, data, LOCAL, start, ctx._replace(round=3), path="stacked")
    assert not close(other, looped, 1e-3)


def test_dropout_masks_have_the_right_share_and_scale():
    layer = nn.Dropout(0.3).train()
    hook_keyed_layers(layer, static=False).begin(torch.tensor(7))
    assert type(layer) is nn.Dropout
    first, second = layer(torch.ones(200, 100)), layer(torch.ones(200, 100))
    assert torch.allclose(first.unique(), torch.tensor([0.0, 1 / 0.7]))
    assert (first == 0).float().mean() == pytest.approx(0.3, abs=0.01)
    both = ((first == 0) & (second == 0)).float().mean()
    assert both == pytest.approx(0.09, abs=0.01)  # independent from call to call
    assert torch.equal(layer.eval()(torch.ones(3)), torch.ones(3))


def test_dropout_does_not_depend_on_padding():
    step = KeyedStep()
    step.begin(torch.tensor(11))
    short = step.uniform(10)
    step.begin(torch.tensor(11))
    assert torch.equal(step.uniform(25)[:10], short)


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.25, 0.3, 0.5, 0.9, 1 - 1e-9, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_one_client_on_a_cpu_drops_the_same(p, dtype):
    one, other = KeyedStep(), KeyedStep()
    for key in (0, 11, -(1 << 63), (1 << 63) - 1):
        one.begin(key)
        other.begin(torch.tensor(key))
        for n in (5000, 7, 6000):
            assert torch.equal(one.scale(n, p, dtype), other.scale(n, p, dtype))


def test_a_model_may_have_many_layers_with_dropout():
    step = KeyedStep()
    step.begin(torch.tensor(11))
    draws = torch.stack([step.uniform(100) for _ in range(50)])
    assert len(draws.unique()) > 4_900


def test_dropping_everything_gives_zeros():
    layer = nn.Dropout(1.0).train()
    hook_keyed_layers(layer, static=False).begin(torch.tensor(7))
    assert torch.equal(layer(torch.ones(4)), torch.zeros(4))


@pytest.mark.parametrize("make", [dropping, dropping_channels, Functional, Recurrent])
def test_rows_do_not_depend_on_cohort_or_chunk(make):
    model, data = built(make), cohort([5, 20, 1, 33, 12])
    start = tree_of(model)
    whole, notes = train(model, cross_entropy, data, LOCAL, start, round_of([4, 0, 3, 2, 1], data))
    for k, i in enumerate([4, 0, 3, 2, 1]):
        single, note = train(model, cross_entropy, data, LOCAL, start, round_of([i], data))
        assert tree_sha256(take_rows(whole, slice(k, k + 1))) == tree_sha256(single)
        assert torch.equal(notes["loss"][k : k + 1], note["loss"])


def test_shuffling_is_keyed_by_client_and_round():
    """Two clients with the same samples walk through them differently, and differently again next round."""
    x, y = cohort([40]).client(0)
    model, data = built(lambda: nn.Linear(6, 3)), Clients.of([(x, y), (x, y)])
    local = Local((Phase(epochs=1, batch=4, optimiser=Optimiser(lr=0.5)),))
    a, _ = train(model, cross_entropy, data, local, tree_of(model), round_of([0, 1], data))
    b, _ = train(model, cross_entropy, data, local, tree_of(model), round_of([0, 1], data, round=3))
    assert bool((a["weight"][0] != a["weight"][1]).any())
    assert bool((a["weight"] != b["weight"]).flatten(1).any(1).all())


@pytest.mark.parametrize("make", [dropping, Functional])
def test_the_world_is_left_as_it_was(make):
    model, data = built(make).eval(), cohort([5, 20])
    torch.manual_seed(3)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(3)
    before = torch.get_rng_state(), numpy_state(), tree_sha256(tree_of(model)), torch.get_num_threads()
    modes = [layer.training for layer in model.modules()], [type(layer) for layer in model.modules()]
    with torch.no_grad():
        for path in ("loop", "loop-fast", *(["stacked"] if make is dropping else [])):
            train(model, cross_entropy, data, LOCAL, tree_of(model), round_of([0, 1], data), path=path)
            assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (numpy_state(), tree_sha256(tree_of(model)), torch.get_num_threads()) == before[1:]
    torch.set_num_threads(threads_before)
    assert modes == ([layer.training for layer in model.modules()], [type(layer) for layer in model.modules()])
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_stacked_path_refuses_unkeyed_randomness():
    model, data = built(Functional), cohort([5, 20])
    with pytest.raises(ConfigError, match=r"F\.dropout.*use path 'loop'"):
        train(model, cross_entropy, data, LOCAL, tree_of(model), round_of([0, 1], data), path="stacked")


def test_rows_of_one_client_have_keys_of_their_own_and_the_first_has_the_clients():
    plain, bases = make_ctx([4, 7, 9]), make_ctx([4, 4, 4, 7, 9, 9])
    want, got = plain.keys("dropout/1"), dropout_keys(bases, 1)
    assert torch.equal(dropout_keys(plain, 1), want)
    assert torch.equal(got[[0, 3, 4]], want)
    assert len(set(got.tolist())) == 6
    assert torch.equal(dropout_keys(bases.at(slice(4, 6)), 1), got[4:])
