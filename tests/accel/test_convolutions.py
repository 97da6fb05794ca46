"""A convolution of few values gives what torch's own gives, and only those are taken that can be."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparing.accel.train_cpu import convolutions as conv
from sparing.accel.train_cpu.convolutions import UnfoldedConv, has_few_unfolded
from sparing.accel.train_cpu.fast_copy import fast_copy

CPU = torch.device("cpu")


def copied(model: nn.Module) -> nn.Module:
    return fast_copy(model, CPU, static=False).work.module


LAYERS = {
    "plain": nn.Conv2d(3, 4, 3),
    "padded": nn.Conv2d(3, 4, 3, padding=1),
    "strided": nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(0, 1)),
    "no bias": nn.Conv2d(3, 4, 2, bias=False),
    "in one axis": nn.Conv2d(3, 4, (1, 3)),
    "one channel": nn.Conv2d(1, 4, 2),
    "one output": nn.Conv2d(3, 1, 3, padding=1),
    "wide": nn.Conv2d(16, 32, 3, padding=1),
}


def by_hand(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    columns = F.unfold(x, layer.kernel_size, padding=layer.padding, stride=layer.stride)
    y = layer.weight.reshape(len(layer.weight), -1) @ columns
    y = y if layer.bias is None else y + layer.bias[:, None]
    high = (x.shape[2] + 2 * layer.padding[0] - layer.kernel_size[0]) // layer.stride[0] + 1
    return y.unflatten(2, (high, -1))


LAID = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("few", [1 << 40, 0])
@pytest.mark.parametrize("weights", LAID)
@pytest.mark.parametrize("images", LAID)
def test_values_and_gradients_whatever_the_order_of_axes(name, dtype, few, weights, images, monkeypatch):
    monkeypatch.setattr(conv, "FEW_UNFOLDED", few)
    layer = copied(LAYERS[name].to(dtype)).to(memory_format=weights)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, LAYERS[name].in_channels, 6, 7, generator=g, dtype=dtype)
    x = x.contiguous(memory_format=images).requires_grad_()
    assert has_few_unfolded(x, layer) == (few > 0)
    seen = []
    for y in (layer(x), by_hand(layer, x)):
        for laid in LAID:
            d = torch.arange(y.numel(), dtype=dtype).view(y.shape).cos().contiguous(memory_format=laid)
            seen.append((y, *torch.autograd.grad(y, [x, *layer.parameters()], d, retain_graph=True)))
    for other in seen[:3]:
        for ours, theirs in zip(other, seen[3], strict=True):
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-4 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("few", [1 << 40, 0])
@pytest.mark.parametrize("weights", LAID)
@pytest.mark.parametrize("shape", [(2, 1, 4, 2), (1, 2, 1, 1), (2, 3, 1, 1), (2, 3, 1, 4), (1, 3, 4, 1)])
@pytest.mark.parametrize("moved", [(0, 1, 2, 3), (0, 3, 1, 2), (0, 1, 3, 2)])
def test_images_of_odd_shapes_and_orders(few, weights, shape, moved, monkeypatch):
    monkeypatch.setattr(conv, "FEW_UNFOLDED", few)
    layer = copied(nn.Conv2d(shape[1], 4, (3, 2), padding=1).double()).to(memory_format=weights)
    back = [moved.index(axis) for axis in range(4)]
    x = torch.arange(torch.Size(shape).numel()).double().view(shape).cos()
    x = x.permute(back).contiguous().permute(moved).requires_grad_()
    assert x.shape == shape
    grads = [torch.autograd.grad(y.cos().sum(), [x, *layer.parameters()]) for y in (layer(x), by_hand(layer, x))]
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_what_is_small_is_counted_in_unfolded_values(monkeypatch):
    monkeypatch.setattr(conv, "FEW_UNFOLDED", 2 * 3 * 4 * 4 * 9)
    x = torch.zeros(2, 3, 4, 4)
    assert has_few_unfolded(x, nn.Conv2d(3, 1, 3))
    assert not has_few_unfolded(torch.zeros(3, 3, 4, 4), nn.Conv2d(3, 1, 3))
    assert has_few_unfolded(torch.zeros(8, 3, 4, 4), nn.Conv2d(3, 1, 3, stride=2))


OTHERS = {
    "grouped": nn.Conv2d(4, 4, 3, groups=2),
    "dilated": nn.Conv2d(4, 4, 3, dilation=2),
    "same": nn.Conv2d(4, 4, 3, padding="same"),
    "reflecting": nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    "lazy": nn.LazyConv2d(4, 3),
    "of single places": nn.Conv2d(4, 4, 1),
    "sequences": nn.Conv1d(4, 4, 3),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions_stay_as_they_are(name):
    layer = OTHERS[name]
    if isinstance(layer, nn.LazyConv2d):
        layer(torch.zeros(1, 4, 5, 5))  # becomes a plain one
        assert type(copied(layer)) is UnfoldedConv
    else:
        assert type(copied(layer)) is type(layer)


def test_a_single_image_lower_precision_and_mapping_go_torchs_way():
    plain = LAYERS["padded"].float()
    layer, x = copied(plain), torch.randn(2, 3, 6, 7)
    assert torch.allclose(layer(x[0]), plain(x[0]), atol=1e-6)
    assert torch.allclose(torch.func.vmap(layer)(x[:, None])[:, 0], plain(x), atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_gradients_of_gradients():
    layer, x = copied(nn.Conv2d(2, 3, 3)), torch.randn(2, 2, 5, 5, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), layer.weight)
    assert second.abs().sum() > 0
