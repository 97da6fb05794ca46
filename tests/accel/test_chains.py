"""Layers run in another order give the same bits, and a model that looks at them finds them in its own."""

import copy

import pytest
import torch
from torch import nn

from sparing.accel.train_cpu import chains as chain
from sparing.accel.train_cpu.chains import Chain
from sparing.accel.train_cpu.fast_copy import fast_copy

CPU = torch.device("cpu")


def copied(model: nn.Module) -> nn.Module:
    return fast_copy(model, CPU, static=False).work.module


def images(*shape: int) -> torch.Tensor:
    """Few different values, so that windows have several largest ones, and many have none above zero."""
    return torch.randint(-3, 2, shape, generator=torch.Generator().manual_seed(0)).float()


POOLS = {
    "plain": nn.MaxPool2d(2),
    "overlapping": nn.MaxPool2d(3, 2, padding=1),
    "ceiling": nn.MaxPool2d(3, ceil_mode=True),
    "dilated": nn.MaxPool2d(2, dilation=2),
}


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("laid", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("turned", [1, 1 << 30])
def test_relu_after_pooling_has_the_same_bits(name, inplace, laid, turned, monkeypatch):
    monkeypatch.setattr(chain, "TURNED", turned)
    plain = nn.Sequential(nn.Identity(), nn.ReLU(inplace), POOLS[name], nn.Flatten())
    quick, seen = copied(plain), []
    assert type(quick) is Chain
    for model in (plain, quick):
        x = images(4, 3, 8, 8).contiguous(memory_format=laid).requires_grad_()
        y = model(x * 1)
        (y * torch.arange(y.numel()).view_as(y)).sum().backward()
        seen.append((y.detach(), x.grad))
    assert torch.equal(seen[0][0], seen[1][0])
    assert torch.equal(seen[0][1], seen[1][1])
    assert seen[0][1].any()


def test_relu_looks_at_what_was_pooled():
    model, sizes = copied(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.ReLU())), []
    for layer in model:
        layer.register_forward_hook(lambda layer, args, out: sizes.append((type(layer), args[0].shape[-1])))
    model(images(1, 1, 8, 8))
    assert sizes == [(nn.MaxPool2d, 8), (nn.ReLU, 4), (nn.ReLU, 4)]


def test_chains_that_are_looked_into_stay_as_they_are():
    plain = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    hooked = copy.deepcopy(plain)
    hooked[0].register_forward_hook(lambda layer, args, out: None)
    assert type(copied(hooked)) is nn.Sequential
    assert type(copied(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)))(images(1, 1, 4, 4))) is tuple
    assert [type(layer) for layer in copied(plain)] == [nn.ReLU, nn.MaxPool2d]
    x = images(2, 1, 4, 4)
    assert torch.equal(copied(plain)[:1](x), plain[:1](x))


def test_dropout_before_a_flattening_gives_what_can_be_flattened_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.3), nn.Flatten(), nn.Dropout(0.3))
    work = fast_copy(model, CPU, static=False).work
    for flat in (True, False):
        work.module[1].flat = flat
        work.step.begin(5)
        y = work.module[1](work.module[0](images(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)))
        assert y.is_contiguous() == flat
