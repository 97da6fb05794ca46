"""Operations on whole trees, each a line or two: what a round is made of. Any of them may get a faster body."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from sparing.core.operation import operation
from sparing.core.tree import Masks, Tree, cleared


@operation
def place(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on that device."""
    return x.to(device)


@operation
def constants(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """These numbers on that device, `[n]` int64."""
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@operation
def to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Tensors on their way to the host; whoever needs them calls what this gives."""
    found = [x.cpu() for x in tensors]
    return lambda: found


@operation
def restrict(tree: Mapping[str, Tensor], names: Iterable[str]) -> Mapping[str, Tensor]:
    """The tree without other names."""
    return {name: tree[name] for name in names}


@operation
def is_formed(x: Tensor) -> bool:
    """Whether its entries are in memory; others may stand for a computation that nobody has asked for yet."""
    return True


@operation
def clear(tree: Tree, masks: Masks) -> Tree:
    """The tensors that have a mask, with zeros wherever it is false."""
    return {name: cleared(tree[name], mask) for name, mask in masks.items()}


@operation
def overlay(own: Tree, new: Tree, masks: Masks) -> Tree:
    """`own` with `new` written over it, tensors with a mask only where that is true."""
    written = {n: x if (mask := masks.get(n)) is None else torch.where(mask, x, own[n]) for n, x in new.items()}
    return own | written


@operation
def increments(after: Mapping[str, Tensor], base: Tree, masks: Masks) -> Tree:
    """What was added to `base` (where that has no such tensor, to zero), within each mask."""
    return {name: cleared(after[name] - base[name] if name in base else after[name], m) for name, m in masks.items()}


@operation
def against_model(model: Tree, base: Tree, added: Tree, masks: Masks) -> Tree:
    """Increments on `base` as differences from the model, within each mask."""
    update = {}
    for name, x in added.items():
        if name not in base:
            x = x - model[name]
        elif base[name] is not model[name]:
            x = x + (base[name] - model[name])
        update[name] = cleared(x, masks[name])
    return update


@operation
def add_each(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """Sums of many pairs."""
    return [x + y for x, y in zip(xs, ys, strict=True)]


@operation
def move_model(model: Tree, update: Tree, masks: Masks) -> Tree:
    """The model after an update in float64; where a mask is false, and in whole numbers' fractions, it stays."""
    return model | {name: move_tensor(model[name], x, masks.get(name)) for name, x in update.items()}


def move_tensor(old: Tensor, update: Tensor, mask: Tensor | None = None) -> Tensor:
    """One tensor of it."""
    if old.is_floating_point():
        new = old.double().add(update).to(old.dtype)
    else:
        new = old + update.round().to(old.dtype)
    return new if mask is None else torch.where(mask, new, old)


@operation
def bounds(tree: Mapping[str, Tensor]) -> Tensor:
    """The largest magnitude of each tensor, or a bound on it: `[tensors]` float64; NaN if there is one."""
    found = [largest_magnitude(x) for x in tree.values()]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)


def largest_magnitude(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    low, high = torch.aminmax(x)  # both carry NaN along
    return torch.maximum(-low.double(), high.double())
