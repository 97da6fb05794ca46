"""Trees: flat dicts of tensors whose first axis is the client axis.

A `Tree` maps state_dict names to leaves `[K, *shape]`; axis 0 may be 1, meaning shared by all K clients.
Everything that is remembered anywhere (models, residuals, server momentum) is a Tree, so one bank, one checkpoint
and one hash serve all of it.

    >>> stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"].shape
    torch.Size([2, 2])
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Tree = dict[str, Tensor]


class Layout(NamedTuple):
    """What both ends know of a model before any value: names, shapes, dtypes, and which names are buffers."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    buffers: frozenset[str] = frozenset()

    @property
    def params(self) -> list[str]:
        return [name for name in self.shapes if name not in self.buffers]

    @property
    def size(self) -> int:
        """Number of parameters, buffers not included."""
        return sum(math.prod(self.shapes[name]) for name in self.params)


def layout_of(model: torch.nn.Module) -> Layout:
    state = model.state_dict()
    return Layout(
        {name: tuple(x.shape) for name, x in state.items()},
        {name: x.dtype for name, x in state.items()},
        frozenset(state) - {name for name, _ in model.named_parameters(remove_duplicate=False)},
    )


def tree_of(model: torch.nn.Module) -> Tree:
    """The model's state as leaves `[1, *shape]`, copied."""
    return {name: x.detach().clone()[None] for name, x in model.state_dict().items()}


def rows(tree: Tree) -> int:
    return max((x.shape[0] for x in tree.values()), default=1)


def take(tree: Tree, index: Tensor | slice) -> Tree:
    """Rows `index` of a tree; shared leaves stay shared."""
    return {name: x if x.shape[0] == 1 else x[index] for name, x in tree.items()}


def expand(tree: Tree, k: int) -> Tree:
    """Shared leaves shown to k clients, without copying."""
    return {name: x.expand(k, *x.shape[1:]) for name, x in tree.items()}


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree per client, without the client axis, to one tree with it."""
    return {name: torch.stack([t[name] for t in trees]) for name in trees[0]} if trees else {}


def cat(trees: Sequence[Tree]) -> Tree:
    return {name: torch.cat([t[name] for t in trees]) for name in trees[0]} if trees else {}


def to(tree: Tree, device: torch.device | str) -> Tree:
    return {name: x.to(device) for name, x in tree.items()}


def prefixed(prefix: str, tree: Tree) -> Tree:
    return {f"{prefix}/{name}": x for name, x in tree.items()}


def under(prefix: str, tree: Tree) -> Tree:
    """The subtree that `prefixed` put in.

    >>> under("own", {"own/w": torch.zeros(1), "up/w": torch.ones(1)})
    {'w': tensor([0.])}
    """
    start = prefix + "/"
    return {name[len(start) :]: x for name, x in tree.items() if name.startswith(start)}


def sha256(tree: Tree) -> str:
    """One fingerprint of names, dtypes, shapes and every bit of every value."""
    digest = hashlib.sha256()
    for name in sorted(tree):
        x = tree[name].detach().cpu().contiguous()
        digest.update(f"{name}|{x.dtype}|{tuple(x.shape)}|".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
