# pyright: reportAttributeAccessIssue=false
# torch has a name for this function only among its internals.
"""Convolutions of few values: unfolded and multiplied, which takes less time than oneDNN needs to get ready."""

import torch
from torch import Tensor, nn

from sparing.task.outer import in_other_hands

FEW = 1 << 15
"""Unfolded values up to which it pays, measured forward and backward on one core: a tenth to two thirds less time."""


class SmallConv(nn.Conv2d):
    """nn.Conv2d, which does so where there is not much to do.

    Its input is laid out as its weight is: where they differ, torch may give a wrong gradient of the weight.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.ndim != 4 or in_other_hands(input):
            return super().forward(input)
        input = laid_as(self.weight, input)
        if not is_small(input, self):
            return super().forward(input)
        return torch._C._nn.thnn_conv2d(input, self.weight, self.kernel_size, self.bias, self.stride, self.padding)


def laid_as(weight: Tensor, x: Tensor) -> Tensor:
    """Weights of one channel are laid out both ways, and so are its images."""
    plain, last = (weight.is_contiguous(memory_format=way) for way in (torch.contiguous_format, torch.channels_last))
    return x.contiguous(memory_format=torch.channels_last if last and not plain else torch.contiguous_format)


def is_small(x: Tensor, layer: nn.Conv2d) -> bool:
    """How images of one place are laid out cannot be told, so they are not."""
    (high, wide), (down, across) = layer.kernel_size, layer.stride
    return x.shape[2:].numel() > 1 and x.numel() * high * wide <= FEW * down * across


def recast_convolutions(model: nn.Module) -> None:
    """Turn the convolutions of this working copy on a CPU into the ones above, where they can be."""
    for layer in model.modules():
        if type(layer) is nn.Conv2d and can_unfold(layer) and layer.weight.device.type == "cpu":
            layer.__class__ = SmallConv


def can_unfold(layer: nn.Conv2d) -> bool:
    """Not where there is nothing to unfold: how such a weight is laid out cannot be told."""
    padded = isinstance(layer.padding, tuple) and layer.padding_mode == "zeros"
    return padded and layer.groups == 1 and set(layer.dilation) == {1} and set(layer.kernel_size) != {1}
