"""Trees: flat dicts of tensors whose first axis is the client axis.

A `Tree` maps state_dict names to leaves `[K, *shape]`; axis 0 may be 1, meaning shared by all K clients.
Everything that is remembered anywhere (models, residuals, server momentum) is a Tree, so one bank, one checkpoint
and one hash serve all of it.

    >>> cat_trees([{"w": torch.zeros(1, 2)}, {"w": torch.ones(1, 2)}])["w"].shape
    torch.Size([2, 2])
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.operation import operation

Tree = dict[str, Tensor]
Models = Mapping[str, Tensor]
"""K models: a Tree, or one whose tensors are worked out when somebody asks for them."""
Masks = Mapping[str, Tensor | None]
"""Booleans that broadcast to a tensor of the same name; None: everywhere."""


class Kind(NamedTuple):
    """What a weight belongs to, where its shape alone does not say."""

    name: str  # "conv" (its weight is [filters, channels per group, *kernel]) or "linear" ([outputs, inputs])
    groups: int = 1


class Layout(NamedTuple):
    """What both ends know of a model before any value: names, shapes, dtypes, and which names are buffers."""

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    buffers: frozenset[str] = frozenset()
    kinds: dict[str, Kind] = {}  # noqa: RUF012  of the weights of convolutions and dense layers
    extra: frozenset[str] = frozenset()  # of the buffers: those that a method added to what the network learns
    bases: int = 0  # networks that the model is split into, each with its row of every tensor, which then has no kind

    @property
    def params(self) -> list[str]:
        return [name for name in self.shapes if name not in self.buffers]

    @property
    def floats(self) -> list[str]:
        """Parameters that are not whole numbers: what can be rounded, factored or averaged."""
        return [name for name in self.params if self.dtypes[name].is_floating_point]

    @property
    def size(self) -> int:
        """Number of parameters, buffers not included."""
        return sum(math.prod(self.shapes[name]) for name in self.params)


def layout_of(model: torch.nn.Module, static: bool = False) -> Layout:
    """What can be learned and shared: trainable parameters and float or int64 buffers, each tensor once.

    Frozen parameters, other kinds of numbers, and buffers that are `static` stay as they were built: see `rest_of`.
    """
    state, frozen = (
        _learnable_tensors(model, static),
        {name for name, p in model.named_parameters() if not p.requires_grad},
    )
    shared = {name: x for name, x in state.items() if name not in frozen}
    params = {name for name, _ in model.named_parameters()}
    return Layout(
        {name: tuple(x.shape) for name, x in shared.items()},
        {name: x.dtype for name, x in shared.items()},
        frozenset(shared) - params,
        {name: kind for name, kind in layer_kinds(model).items() if name in shared},
        bases=bases_in(model),
    )


def bases_in(model: torch.nn.Module) -> int:
    """How many networks a model is split into that says so by `bases`, each with its row of every tensor; mostly 0."""
    bases = getattr(model, "bases", 0)
    return bases if isinstance(bases, int) else 0


def layer_kinds(model: torch.nn.Module) -> dict[str, Kind]:
    """The weights of convolutions (transposed ones apart: their axes differ) and of dense layers."""
    convs, kinds = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d), {}
    if bases_in(model):
        return kinds
    for path, layer in model.named_modules():
        name = f"{path}.weight" if path else "weight"
        if isinstance(layer, convs):
            kinds[name] = Kind("conv", layer.groups)
        elif isinstance(layer, torch.nn.Linear):
            kinds[name] = Kind("linear")
    return kinds


def _learnable_tensors(model: torch.nn.Module, static: bool) -> Tree:
    tied, params = tied_names(model), {name for name, _ in model.named_parameters()}
    return {
        name: x
        for name, x in model.state_dict().items()
        if name not in tied and (x.is_floating_point() or x.dtype == torch.int64) and (name in params or not static)
    }


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Names of tensors that the model holds twice, and the first name of each."""
    first: dict[int, str] = {}
    names = ((name, id(x)) for name, x in model.state_dict(keep_vars=True).items())
    return {name: first[key] for name, key in names if first.setdefault(key, name) != name}


def tree_of(model: torch.nn.Module, layout: Layout | None = None) -> Tree:
    """The model's tensors, or those of the layout only, as leaves `[1, *shape]`, copied."""
    state = model.state_dict()
    return {name: state[name].detach().clone()[None] for name in (layout.shapes if layout else state)}


def with_extra(layout: Layout, names: Sequence[str], suffix: str) -> Layout:
    """The layout with one more tensor NAME.suffix for every one of these, treated like a buffer by every part."""
    more = {f"{name}.{suffix}": name for name in names}
    return layout._replace(
        shapes=layout.shapes | {new: layout.shapes[old] for new, old in more.items()},
        dtypes=layout.dtypes | {new: layout.dtypes[old] for new, old in more.items()},
        buffers=layout.buffers | frozenset(more),
        extra=layout.extra | frozenset(more),
    )


class Rest(NamedTuple):
    """What a model holds beside its layout: tensors that never change, and second names for shared ones."""

    fixed: Tree
    tied: dict[str, str]

    def complete(self, tree: Tree) -> Tree:
        """A tree over the layout, with everything the model needs to run that is not in it."""
        whole = self.fixed | tree
        return whole | {name: whole[first] for name, first in self.tied.items()}


def rest_of(model: torch.nn.Module, layout: Layout) -> Rest:
    """Frozen parameters are the model's own, not copies: a large base is held once."""
    tied, state = tied_names(model), model.state_dict()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    fixed = {name: x.detach() for name, x in state.items() if name not in layout.shapes and name not in tied}
    return Rest({name: (x if name in frozen else x.clone())[None] for name, x in fixed.items()}, tied)


def row_count(tree: Tree) -> int:
    return max((x.shape[0] for x in tree.values()), default=1)


def take_rows(tree: Tree, index: Tensor | slice) -> Tree:
    """Rows `index` of a tree; shared leaves stay shared."""
    return {name: x if x.shape[0] == 1 else x[index] for name, x in tree.items()}


def flat(x: Tensor) -> Tensor:
    """`[K, *shape]` -> `[K, n]`, also for scalars and for tensors without entries."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


@operation
def cleared(value: Tensor, mask: Tensor | None) -> Tensor:
    """The value with zeros wherever the mask is false."""
    return value if mask is None else torch.where(mask, value, 0)


def column(x_K: Tensor, like: Tensor) -> Tensor:
    """One number per client, `[K]`, broadcastable to a leaf `[K, *shape]`."""
    return x_K.reshape(-1, *[1] * (like.dim() - 1))


def expand_rows(tree: Tree, k: int) -> Tree:
    """Shared leaves shown to k clients, without copying."""
    return {name: x.expand(k, *x.shape[1:]) for name, x in tree.items()}


def cat_trees(trees: Sequence[Tree]) -> Tree:
    return {name: torch.cat([t[name] for t in trees]) for name in trees[0]} if trees else {}


def tree_to(tree: Mapping[str, Tensor], device: torch.device | str) -> Tree:
    return {name: x.to(device) for name, x in tree.items()}


def prefixed(prefix: str, tree: Mapping[str, Tensor]) -> Tree:
    return {f"{prefix}/{name}": x for name, x in tree.items()}


def under(prefix: str, tree: Tree) -> Tree:
    """The subtree that `prefixed` put in.

    >>> under("own", {"own/w": torch.zeros(1), "up/w": torch.ones(1)})
    {'w': tensor([0.])}
    """
    start = prefix + "/"
    return {name[len(start) :]: x for name, x in tree.items() if name.startswith(start)}


def tree_sha256(tree: Tree) -> str:
    """One fingerprint of names, dtypes, shapes and every bit of every value."""
    digest = hashlib.sha256()
    for name in sorted(tree):
        x = tree[name].detach().cpu().contiguous()
        digest.update(f"{name}|{x.dtype}|{tuple(x.shape)}|".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
