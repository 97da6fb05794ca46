"""Steps taken from the factors of a gradient are the steps of the gradient, whatever a model does with its layers."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparing.accel.keyed_classes import stacked_copy
from sparing.accel.train_cpu import chains as chain
from sparing.accel.train_cpu import outer_sgd as outer
from sparing.accel.train_cpu.convolutions import UnfoldedConv, has_few_places, recast_convolutions
from sparing.accel.train_cpu.fast_copy import fast_copy
from sparing.accel.train_cpu.outer_sgd import ROWS, OuterLinear, dense_product, descend, is_plain_sgd, moving_by_factors
from sparing.core.context import context
from sparing.core.method import Local, Phase
from sparing.core.optimiser import Optimiser
from sparing.core.tree import tree_of, tree_sha256
from sparing.data.clients import Clients
from sparing.train.local import train
from sparing.train.losses import cross_entropy

CLOSE = 1e-12  # in float64, after a dozen steps


class Twice(nn.Module):
    """One layer used twice, its weight once more by hand, and an output tied to it."""

    def __init__(self):
        super().__init__()
        self.layer, self.tied = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.tied.weight = self.layer.weight

    def forward(self, x):
        y = self.layer(self.layer(x).tanh())
        return self.tied(F.linear(y, self.layer.weight.T).tanh())


class Sloped(nn.Module):
    """A forward that takes a gradient itself."""

    def __init__(self, functional: bool = False):
        super().__init__()
        self.layer, self.head, self.functional = nn.Linear(6, 6), nn.Linear(6, 3), functional

    def energy(self, x):
        return self.layer(x).tanh().square().sum()

    def forward(self, x):
        if self.functional:
            return self.head(torch.func.grad(self.energy)(x))
        with torch.enable_grad():
            x = x.requires_grad_()
            slope = torch.autograd.grad(self.energy(x), x, create_graph=True)[0]
        return self.head(slope)


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return torch.func.vmap(self.layer)(x[:, None])[:, 0]


class Sequence(nn.Module):
    """Three axes, and a layer without bias first."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(3, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.first(x.unflatten(1, (2, 3))).tanh()).mean(1)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.idle = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)


class Folded(nn.Module):
    """Convolutions of few places, one of them used twice; what is learned from may be their slope."""

    def __init__(self, sloped: bool = False):
        super().__init__()
        self.first, self.twice = nn.Conv2d(1, 192, (1, 3), padding=1, bias=False), nn.Conv2d(192, 192, 3, padding=1)
        self.last, self.head = nn.Conv2d(192, 64, (2, 3), stride=(2, 3)), nn.Linear(6 if sloped else 128, 3)
        self.sloped = sloped

    def folded(self, x):
        return self.last(self.twice(self.twice(self.first(x)).tanh())).tanh()

    def forward(self, x):
        x = x.unflatten(1, (1, 2, 3))
        if not self.sloped:
            return self.head(self.folded(x).flatten(1))
        with torch.enable_grad():
            x = x.requires_grad_()
            slope = torch.autograd.grad(self.folded(x).square().mean(), x, create_graph=True)[0]
        return self.head(slope.flatten(1))


MODELS = {
    "chain": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)),
    "twice": Twice,
    "sloped": Sloped,
    "functional": lambda: Sloped(functional=True),
    "mapped": Mapped,
    "sequence": Sequence,
    "unused": Unused,
    "folded": Folded,
    "folded and sloped": lambda: Folded(sloped=True),
    "folded in a chain": lambda: nn.Sequential(
        nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)
    ),
    "pooled": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 1), nn.MaxPool2d((1, 2)), nn.Flatten(), nn.Linear(8, 3)
    ),
}


def built(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MODELS[name]().double()


def trained(model, monkeypatch, large: int, phase: Phase) -> dict:
    monkeypatch.setattr(outer, "LARGE", large)
    g = torch.Generator().manual_seed(0)
    pairs = [
        (torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(3, (n,), generator=g)) for n in (20, 7)
    ]
    data, ids = Clients.of(pairs), torch.arange(2)
    ctx = context(seed=5, round=2, rounds=9, ids=ids, n=data.count[ids], clients=2, samples=27)
    return dict(train(model, cross_entropy, data, Local((phase, phase)), tree_of(model), ctx, "loop-fast")[0])


@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_with_gradients(name, monkeypatch):
    model, phase = built(name), Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.3))
    formed, factored = (trained(model, monkeypatch, large, phase) for large in (1 << 40, 1))
    start = tree_of(model)
    assert any(not torch.equal(x, start[key].expand_as(x)) for key, x in formed.items()), "nothing was learned"
    for key, x in formed.items():
        assert torch.allclose(factored[key], x, rtol=0, atol=CLOSE), key


def test_within_a_millionth_in_single_precision(monkeypatch):
    model, phase = built("chain").float(), Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.3))
    g = torch.Generator().manual_seed(0)
    data = Clients.of([(torch.randn(30, 6, generator=g), torch.randint(3, (30,), generator=g))])
    ctx = context(seed=5, round=2, rounds=9, ids=torch.arange(1), n=data.count, clients=1, samples=30)
    seen = []
    for large in (1 << 40, 1):
        monkeypatch.setattr(outer, "LARGE", large)
        seen.append(train(model, cross_entropy, data, Local((phase,)), tree_of(model), ctx, "loop-fast")[0])
    for key, x in seen[0].items():
        assert torch.allclose(seen[1][key], x, rtol=0, atol=1e-6), key


OTHERS = {
    "momentum": {"optimiser": Optimiser(momentum=0.9)},
    "decay": {"optimiser": Optimiser(weight_decay=0.01)},
    "clip": {"optimiser": Optimiser(clip=1.0)},
    "prox": {"prox": 0.1},
    "adam": {"optimiser": Optimiser("adam")},
    "options": {"optimiser": Optimiser(options=(("maximize", True),))},
    "correct": {"correct": True},
    "frobenius": {"frobenius": 0.1},
    "holds": {"holds": frozenset({"0.weight"})},
}


@pytest.mark.parametrize("name", OTHERS)
def test_only_plain_sgd_is_taken_so(name):
    assert is_plain_sgd(Phase())
    assert not is_plain_sgd(Phase(**OTHERS[name]))


def test_layers_that_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(outer, "LARGE", 1)
    model = nn.Sequential(nn.Linear(6, 8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 3))
    work, outer_layers, _ = fast_copy(model, torch.device("cpu"), static=False)
    assert outer_layers == [work.module[0], work.module[2]]
    assert type(stacked_copy(model, torch.device("cpu"), static=False).module[0]) is nn.Linear
    work.module[2].weight.requires_grad_(False)
    assert moving_by_factors(outer_layers, Phase()) == [work.module[0]]
    assert not moving_by_factors(outer_layers, Phase(optimiser=Optimiser(momentum=0.5)))
    monkeypatch.setattr(outer, "LARGE", 49)
    assert not fast_copy(model, torch.device("cpu"), static=False).outer


@pytest.mark.parametrize("laid", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("how", [((3, 3), (1, 1), (1, 1)), ((1, 3), (1, 2), (0, 1))])
@pytest.mark.parametrize("images", [3, 12])
def test_convolutions_move_by_factors_where_places_are_few(images, how, laid):
    few, g = images == 3, torch.Generator().manual_seed(0)
    plain = nn.Conv2d(2, 90, *how).double().to(memory_format=laid)
    layer = copy.deepcopy(plain)
    layer.__class__ = UnfoldedConv
    x = torch.randn(images, 2, 3, 4, generator=g, dtype=torch.float64).requires_grad_()
    assert has_few_places(x, layer) == few
    x_plain, *wanted = torch.autograd.grad(plain(x).cos().sum(), [x, *plain.parameters()])
    moving_by_factors([layer], Phase(optimiser=Optimiser(lr=0.5)))
    x_ours, weight, bias = torch.autograd.grad(layer(x).cos().sum(), [x, *layer.parameters()], allow_unused=True)
    assert (weight is None) == few
    assert torch.allclose(x_ours, x_plain, atol=CLOSE)
    assert torch.allclose(bias, wanted[1], atol=CLOSE)
    descend(layer(x).cos().sum(), [layer.weight], [layer], 0.5)
    assert torch.allclose(layer.weight, plain.weight - 0.5 * wanted[0], atol=CLOSE)


def test_a_convolution_whose_weight_is_laid_out_oddly_moves_by_its_gradient(monkeypatch):
    monkeypatch.setattr("sparing.accel.train_cpu.outer_sgd.LARGE", 1)
    layer = nn.Conv2d(4, 64, 3)
    assert recast_convolutions(layer) == [layer]
    layer = nn.Conv2d(4, 64, 3)
    layer.weight = nn.Parameter(layer.weight.detach().transpose(0, 1).contiguous().transpose(0, 1))
    assert recast_convolutions(layer) == []


@pytest.mark.parametrize("alone", [True, False])
def test_no_gradient_of_the_weight_is_formed(alone):
    layer = nn.Linear(4, 3)
    layer.__class__ = OuterLinear
    layer.alone = alone
    asked: list = []
    moving_by_factors([layer], Phase(optimiser=Optimiser(lr=0.5)))
    handle = layer.weight.register_hook(lambda grad: asked.append(grad))
    loss = layer(torch.ones(2, 4)).sum()
    before = layer.weight.detach().clone()
    descend(loss, list(layer.parameters()), [layer], 0.5)
    handle.remove()
    assert asked in ([], [None])
    assert torch.allclose(layer.weight, before - 0.5 * 2)


def hooked_layer() -> nn.Module:
    layer = nn.ReLU()
    layer.register_forward_hook(lambda layer, args, out: None)
    return layer


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model[1].weight = model[0].weight
    return model


twice = nn.Linear(6, 6)
SEEN = {
    "chain": (MODELS["chain"], True),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1)), nn.BatchNorm1d(6)), True),
    "a layer alone": (lambda: nn.Linear(6, 6), True),
    "a layer twice": (lambda: nn.Sequential(twice, nn.ReLU(), twice), False),
    "a part twice": (lambda: nn.Sequential(*[nn.Sequential(twice)] * 2), False),
    "tied": (tied, False),
    "hooked": (lambda: nn.Sequential(nn.Linear(6, 6), hooked_layer()), False),
    "of one's own": (Unused, False),
    "with one's own": (lambda: nn.Sequential(nn.Linear(6, 6), Unused()), False),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2), False),
    "made from another weight": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), False),
}


@pytest.mark.parametrize("name", SEEN)
def test_whose_weights_nothing_else_looks_at(name, monkeypatch):
    monkeypatch.setattr(outer, "LARGE", 1)
    make, alone = SEEN[name]
    work = fast_copy(make(), torch.device("cpu"), static=False)
    assert {layer.alone for layer in work.outer} <= {alone}
    assert not alone or work.outer


def test_a_step_taken_at_once_has_the_same_bits(monkeypatch):
    model, phase, bits = built("chain").float(), Phase(epochs=2, batch=8, optimiser=Optimiser(lr=0.3)), []
    g = torch.Generator().manual_seed(0)
    data = Clients.of([(torch.randn(30, 6, generator=g), torch.randint(3, (30,), generator=g))])
    ctx = context(seed=5, round=2, rounds=9, ids=torch.arange(1), n=data.count, clients=1, samples=30)
    monkeypatch.setattr(outer, "LARGE", 1)
    for alone in (True, False):
        monkeypatch.setattr(outer, "is_transparent", lambda model, alone=alone: alone)
        bits.append(
            tree_sha256(train(model, cross_entropy, data, Local((phase,)), tree_of(model), ctx, "loop-fast")[0])
        )
    assert bits[0] == bits[1]


@pytest.mark.parametrize("rows", [1, ROWS, 33])
@pytest.mark.parametrize("turned", [False, True])
def test_products_are_those_of_torch(rows, turned):
    g = torch.Generator().manual_seed(0)
    x, bias = torch.randn(rows, 300, generator=g), torch.randn(70, generator=g)
    weight = torch.randn(300, 70, generator=g).T if turned else torch.randn(70, 300, generator=g)
    with torch.no_grad():
        for b in (bias, None):
            assert torch.allclose(dense_product(x, weight, b), F.linear(x, weight, b), rtol=1e-5, atol=1e-4)
    assert dense_product(x, weight.requires_grad_()).requires_grad


def test_in_lower_precision_the_layer_is_torchs_own():
    layer = nn.Linear(4, 3)
    layer.__class__ = OuterLinear
    moving_by_factors([layer], Phase())
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(torch.ones(2, 4)).float().sum()
    before = layer.weight.detach().clone()
    descend(loss, list(layer.parameters()), [layer], 0.5)
    assert torch.allclose(layer.weight, before - 0.5 * 2)


def test_gradients_reach_pooling_in_its_own_order_of_axes(monkeypatch):
    layers = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 9, 2)
    model, seen = nn.Sequential(*layers), []
    grads = []

    def looks(layer, args, out) -> None:
        out.register_hook(lambda grad: seen.append(grad.is_contiguous(memory_format=torch.channels_last)))

    for turned in (5 * 4 * 9, 5 * 4 * 9 + 1):  # values that come out of the pooling
        monkeypatch.setattr(chain, "TURNED", turned)
        work = fast_copy(model, torch.device("cpu"), static=False).work
        work.module[1].register_forward_hook(looks)
        x = torch.ones(5, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        grads.append(torch.autograd.grad(work.module(x).square().sum(), list(work.module.parameters())))
    assert seen == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_who_is_laid_out_channels_last():
    def made(norm, width):
        return nn.Sequential(nn.Conv2d(3, width, 3), norm, nn.Conv2d(width, width, 3))

    narrow, wide = 8, 350  # 3 * 3 * 350 * 350 weights are large
    for model, last in (
        (made(nn.GroupNorm(2, narrow), narrow), True),
        (made(nn.GroupNorm(2, wide), wide), False),
        (made(nn.BatchNorm2d(wide), wide), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), False),
    ):
        work = fast_copy(model, torch.device("cpu"), static=False).work
        images = torch.zeros(2, 3, 4, 5)
        assert work.lay_out(images).is_contiguous(memory_format=torch.channels_last) == last
        conv = work.module[0]
        assert isinstance(conv, nn.Flatten) or conv.weight.is_contiguous(memory_format=torch.channels_last) == last
