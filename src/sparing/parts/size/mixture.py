"""Several networks of one shape as one module (Split-Mix): it gives the mean of what they give.

Every tensor holds one of each network, `[bases, *shape]`, so a few of the networks are a few rows of every tensor.

    >>> mix = Mix([nn.Linear(2, 3), nn.Linear(2, 3)])
    >>> [tuple(x.shape) for x in mix.state_dict().values()], tuple(mix(torch.ones(5, 2)).shape)
    ([(2, 3, 2), (2, 3)], (5, 3))
"""

import copy
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map


class Mix(nn.Module):
    """Its networks train apart, each on its own loss: see `train.local.train`."""

    def __init__(self, nets: Sequence[nn.Module]):
        super().__init__()
        self.bases = len(nets)
        states = [net.state_dict() for net in nets]
        self.net = _filled_copy(nets[0], {name: torch.stack([state[name] for state in states]) for name in states[0]})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        state = self.net.state_dict(keep_vars=True)
        outputs = [
            functional_call(self.net, {name: w[i] for name, w in state.items()}, inputs, named)
            for i in range(self.bases)
        ]
        return tree_map(lambda *given: torch.stack(given).mean(0), *outputs)

    def base(self, i: int) -> nn.Module:
        """One of the networks, by itself."""
        return _filled_copy(self.net, {name: w[i] for name, w in self.net.state_dict().items()})

    def first(self, count: int) -> "Mix":
        return Mix([self.base(i) for i in range(count)])

    def alone(self) -> nn.Module:
        """A single network whose tensors are called as here."""
        base = self.base(0)
        return (nn.Sequential if type(base) is nn.Sequential else _Alone)(OrderedDict(net=base))


class _Alone(nn.Sequential):
    """A network under the name `net`, with whatever inputs it takes."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self[0](*inputs, **named)


def _filled_copy(net: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    """A copy of the network with these tensors, of whatever shape."""
    net = copy.deepcopy(net)
    for name, x in state.items():
        path, _, leaf = name.rpartition(".")
        layer = net.get_submodule(path)
        setattr(layer, leaf, nn.Parameter(x.clone()) if leaf in layer._parameters else x.clone())
    return net
