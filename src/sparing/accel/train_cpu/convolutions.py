# pyright: reportAttributeAccessIssue=false
# torch has a name for this function only among its internals.
"""Convolutions on a CPU that unfold their inputs and multiply, where that takes less time.

With few values, oneDNN takes longer to get ready. With a large weight and few places, forming the weight's gradient
costs more than the step: it is taken from the gradient's factors, as `outer_sgd` does it for dense layers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.accel.train_cpu.outer_sgd import in_torch_func, is_large, leave_factors

FEW_UNFOLDED = 1 << 15
"""Unfolded values up to which it pays, measured forward and backward on one core: a tenth to two thirds less time."""


class OuterConv(torch.autograd.Function):
    """The convolution of x and W. Where autograd wants the gradient of W, what it is made of is left to the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "UnfoldedConv") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.conv2d(x, weight, bias, layer.stride, layer.padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d,), layer = grads, ctx.layer
        x, weight = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        d = laid_as(weight, d)
        back = nn.grad.conv2d_input(x.shape, weight, d, layer.stride, layer.padding) if wants_x else None
        leave_factors(layer, d, x)
        return back, None, d.sum((0, 2, 3)) if wants_bias else None, None


class UnfoldedConv(nn.Conv2d):
    """nn.Conv2d, which does so where it pays.

    Its input is laid out as its weight is: where they differ, torch may give a wrong gradient of the weight.
    """

    factors: list[tuple[Tensor, Tensor]] | None = None
    lr = 0.0
    alone = False

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 4 or in_torch_func():
            return super().forward(input)
        input = laid_as(self.weight, input)
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        if self.factors is not None and has_few_places(input, self):
            return OuterConv.apply(input, self.weight, self.bias, self)
        if not has_few_unfolded(input, self):
            return super().forward(input)
        return torch._C._nn.thnn_conv2d(input, self.weight, self.kernel_size, self.bias, self.stride, self.padding)

    def move(self, d: Tensor, x: Tensor) -> None:
        (high, wide), (down, across), (above, left) = self.kernel_size, self.stride, map(int, self.padding)
        windows = F.pad(x, (left, left, above, above)).unfold(2, high, down).unfold(3, wide, across)
        if is_last(self.weight):
            flat = self.weight.permute(0, 2, 3, 1)
            columns = windows.permute(0, 2, 3, 4, 5, 1).reshape(-1, flat[0].numel())
        else:
            flat = self.weight
            columns = windows.permute(1, 4, 5, 0, 2, 3).reshape(flat[0].numel(), -1).T
        d = d.permute(0, 2, 3, 1).reshape(-1, len(flat))
        flat.view(len(flat), -1).addmm_(d.T, columns, alpha=-self.lr)


def is_last(weight: Tensor) -> bool:
    """Weights of one channel are laid out both ways, and so are its images."""
    return weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


def laid_as(weight: Tensor, x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last if is_last(weight) else torch.contiguous_format)


def has_few_places(x: Tensor, layer: nn.Conv2d) -> bool:
    """Half as many as outputs: then what is unfolded is half as large as the weight."""
    (high, wide), (down, across) = layer.kernel_size, layer.stride
    above, left = map(int, layer.padding)
    rows, columns = (x.shape[2] + 2 * above - high) // down + 1, (x.shape[3] + 2 * left - wide) // across + 1
    return 2 * len(x) * rows * columns <= layer.out_channels


def has_few_unfolded(x: Tensor, layer: nn.Conv2d) -> bool:
    """How images of one place are laid out cannot be told, so they are not."""
    (high, wide), (down, across) = layer.kernel_size, layer.stride
    return x.shape[2:].numel() > 1 and x.numel() * high * wide <= FEW_UNFOLDED * down * across


def recast_convolutions(model: nn.Module) -> list[UnfoldedConv]:
    """Turn the convolutions of this working copy on a CPU into the ones above, where they can be; the large ones."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Conv2d and can_unfold(layer)]
    for layer in layers:
        layer.__class__ = UnfoldedConv
    even = (layer for layer in layers if layer.weight.is_contiguous() or is_last(layer.weight))
    return [layer for layer in even if is_large(layer.weight)]  # pyright: ignore[reportReturnType]


def can_unfold(layer: nn.Conv2d) -> bool:
    """Not where there is nothing to unfold: how such a weight is laid out cannot be told."""
    padded = isinstance(layer.padding, tuple) and layer.padding_mode == "zeros" and layer.weight.device.type == "cpu"
    return padded and layer.groups == 1 and set(layer.dilation) == {1} and set(layer.kernel_size) != {1}
