"""Layers one after the other, laid out and run so that they take less time and give the same bits.

relu(max(x)) is max(relu(x)), and its gradient too goes to the first of the largest values if these are above zero. But
behind the pooling, ReLU has a quarter as many values to look at.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from sparing.accel.keyed_classes import KeyedDropout

TURNED = 1 << 12
"""Values from which on turning the gradient of a pooling's output costs less than pooling with it as it comes."""


class Chain(nn.Sequential):
    """nn.Sequential, but a ReLU right before a max-pooling comes after it."""

    def forward(self, input: Tensor) -> Tensor:
        layers, late = list(self), None
        for layer, after in zip(layers, [*layers[1:], None], strict=True):
            if type(layer) is nn.ReLU and type(after) is nn.MaxPool2d and not after.return_indices:
                late = layer
                continue
            input = layer(input)
            if late is not None:
                input, late = late(input), None
                turn_back(input)
        return input


def turn_back(x: Tensor) -> None:
    """Gradients come back from a flattening in the other order of axes, at which pooling and ReLU are slow."""
    if x.requires_grad and x.ndim == 4 and x.numel() >= TURNED and x.is_contiguous(memory_format=torch.channels_last):
        x.register_hook(lambda grad: grad.contiguous(memory_format=torch.channels_last))


def recast_chains(model: nn.Module) -> None:
    """Turn the sequences of this working copy into the ones above, and tell dropout whether a flattening follows."""
    for chain in [part for part in model.modules() if type(part) is nn.Sequential]:
        if not any(has_hooks(layer) for layer in chain):
            chain.__class__ = Chain
        for layer, after in pairwise(chain):
            if type(layer) is KeyedDropout and type(after) is nn.Flatten:
                layer.flat = True


def has_hooks(layer: nn.Module) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
