"""A small layer of a client's own before the head, as wide as its data allow."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.core.errors import ConfigError


class Adapter(nn.Module):
    """x + up(relu(down(x)) * gate). `up` starts at zero, so at first nothing changes; the gate closes unused places.

    >>> adapter = Adapter(8, width=4)
    >>> x = torch.ones(1, 8)
    >>> bool((adapter(x) == x).all()), list(adapter.gate.shape)
    (True, [4])
    """

    gate: Tensor

    def __init__(self, features: int, width: int):
        super().__init__()
        self.down, self.up = nn.Linear(features, width), nn.Linear(width, features)
        self.register_buffer("gate", torch.ones(width))
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.relu(self.down(x)) * self.gate)


def with_adapter(name: str, model: nn.Module, width: int) -> nn.Module:
    """The network with an adapter of this width before its head."""
    if type(width) is not int or width < 1:
        raise ConfigError(f"{name}.adapter is {width!r}; it is a width: a whole number from 1 on")
    head = getattr(model, "head", None)
    if not isinstance(model, nn.Sequential) or not isinstance(head, nn.Linear):
        raise ConfigError(f"{name} is not a chain of layers that ends in a dense head, so it takes no adapter; drop it")
    layers = OrderedDict(model.named_children())
    del layers["head"]
    return nn.Sequential(OrderedDict(layers, adapter=Adapter(head.in_features, width), head=head))
