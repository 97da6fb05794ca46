"""How many bytes the leaves of K parcels take: in closed form, or by writing those that are tight."""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.operation import operation
from sparing.core.parcel import Leaf, Parcel, client_count, parcel_row
from sparing.core.reduce import count_true
from sparing.wire import index
from sparing.wire.index import Number, packed_size
from sparing.wire.section import CODES, write_leaf

POSITIONS = 1 << 25
"""Mask entries whose index sizes are worked out together."""


class Mask(NamedTuple):
    """One mask of a leaf, to be counted, and where its index travels, to be measured."""

    bits: Tensor  # bool [R, n]
    alive: Tensor | None = None  # bool [R', n]: only these positions count; None: all
    travels: bool = True


class LeafForm(NamedTuple):
    """What else the size of a leaf depends on."""

    n: int  # entries
    item: int  # bytes of a value; 0: packed codes
    bits: int | Tensor  # of a code
    grains: tuple[int, ...]  # entries of each mask, where their counts are multiplied


LeafSizes = Callable[[], list[tuple[Number, Number]]]
"""Bytes of each leaf's values and of its indices, once they are asked for."""


def leaf_sizes(leaves: dict[str, Leaf]) -> LeafSizes:
    """Bytes of each leaf's values and of its indices, a byte apiece for their codes left out.

    Each is a number where it is the same for all clients and no mask is to be counted for it, else an array `[1]` or
    `[K]`: NumPy's operations on few numbers take less time. A device is waited for only by whoever asks; the leaves
    are not held until then.
    """
    cross = {name: _is_crossed(leaf) for name, leaf in leaves.items() if not leaf.tight}
    forms = [_form_of(leaf, cross[name]) if name in cross else name for name, leaf in leaves.items()]
    written = written_sizes({name: leaf for name, leaf in leaves.items() if leaf.tight})
    if all(not leaf.keep and not leaf.told and not leaf.tight for leaf in leaves.values()):
        travels = [[] if leaf.scope is None else [False] for leaf in leaves.values()]
        later = index_sizes([mask for leaf in leaves.values() for mask in _masks_of(leaf, False)])
    else:
        masks = [_masks_of(leaf, cross[name]) if name in cross else [] for name, leaf in leaves.items()]
        travels = [[mask.travels for mask in some] for some in masks]
        later = index_sizes([mask for some in masks for mask in some])

    def every() -> list[tuple[Number, Number]]:
        found, tight, sizes = iter(later()), written(), []
        for form, some in zip(forms, travels, strict=True):
            mine = [next(found) for _ in some]
            indices = sum(one.size for one, paid in zip(mine, some, strict=True) if paid)
            counted = isinstance(form, LeafForm)
            sizes.append((_value_size(form, _value_count(form, mine)), indices) if counted else tight[form])
        return sizes

    return every


def _form_of(leaf: Leaf, cross: bool) -> LeafForm:
    item = 0 if leaf.value.dtype == CODES else leaf.value.element_size()
    grains = tuple(math.prod(keep.shape[1:]) for keep in leaf.keep) if cross else ()
    return LeafForm(math.prod(leaf.value.shape[1:]), item, leaf.bits, grains)


def _masks_of(leaf: Leaf, cross: bool) -> list[Mask]:
    """The masks of a leaf in the order in which they are written, each among what those before left; last, where no
    other way shows how many values are sent, all of them together."""
    shape = leaf.value.shape[1:]
    n = math.prod(shape)
    alive = None if leaf.scope is None else _mask_as_rows(leaf.scope, shape)
    masks = [Mask(alive, travels=leaf.told)] if alive is not None and (leaf.told or not leaf.keep) else []
    for i, keep in enumerate(leaf.keep, 1):
        full = keep.shape[1:] == shape
        masks.append(Mask(keep.reshape(keep.shape[0], n), alive) if full else Mask(keep.flatten(1)))
        if not cross and not (full and i == len(leaf.keep)):
            alive = _mask_as_rows(keep, shape) if alive is None else alive & _mask_as_rows(keep, shape)
    if leaf.keep and alive is not None and leaf.keep[-1].shape[1:] != shape:
        masks.append(Mask(alive, travels=False))
    return masks


def _is_crossed(leaf: Leaf) -> bool:
    """Whether there are masks, each over axes of its own, such as filters and channels: then counts are multiplied."""
    if not leaf.keep or leaf.scope is not None or 0 in leaf.value.shape[1:]:
        return False
    axes = [axis for keep in leaf.keep for axis, n in enumerate(keep.shape[1:]) if n != 1]
    among = len(leaf.keep) > 1 and any(keep.shape[1:] == leaf.value.shape[1:] for keep in leaf.keep)
    return not among and len(axes) == len(set(axes))


def _value_count(form: LeafForm, found: list[index.IndexSizes]) -> Number:
    """How many values are sent."""
    if not form.grains:
        return found[-1].kept if found else form.n
    count, n = 1, form.n
    for one, grain in zip(found, form.grains, strict=True):
        count, n = count * one.kept, n // grain
    return count * n


def _value_size(form: LeafForm, count: Number) -> Number:
    if form.item:
        return count * form.item
    width = form.bits.reshape(-1).long().cpu().numpy() if isinstance(form.bits, Tensor) else form.bits
    return packed_size(count, width)


def _mask_as_rows(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A mask that broadcasts to the shape, `[R, n]`."""
    return mask.expand(-1, *shape).reshape(mask.shape[0], math.prod(shape))


@operation
def written_sizes(leaves: dict[str, Leaf]) -> Callable[[], dict[str, tuple[Number, Number]]]:
    """The same of tight leaves: each client's are written."""
    found = {
        name: sizes_in_order([written_size(name, leaf, k) for k in range(client_count(Parcel({name: leaf}, {})))])
        for name, leaf in leaves.items()
    }
    return lambda: found


def written_size(name: str, leaf: Leaf, k: int) -> tuple[int, int]:
    """Of one client's tight leaf, which is written."""
    return write_leaf(name, parcel_row(Parcel({name: leaf}, {}), k).leaves[name]).size


def sizes_in_order(sizes: list[tuple[int, int]]) -> tuple[Number, Number]:
    """Of the clients one after the other, as arrays."""
    value, indices = np.array(sizes, dtype=np.int64).reshape(-1, 2).T
    return value, indices


@operation
def index_sizes(masks: list[Mask]) -> Callable[[], list[index.IndexSizes]]:
    """Of every mask, in arrays."""
    found = [_measure_mask(mask) if mask.travels else _count_mask(mask) for mask in masks]
    return lambda: found


def _count_mask(mask: Mask) -> index.IndexSizes:
    kept = count_true(mask.bits).cpu().numpy()
    return index.IndexSizes(np.zeros_like(kept), kept)


def _measure_mask(mask: Mask) -> index.IndexSizes:
    """A stretch of rows at a time."""
    bits, alive = mask.bits, mask.alive
    rows, n = max(len(bits), 1 if alive is None else len(alive)), bits.shape[1]
    if alive is None:
        universe = torch.full((rows,), n, device=bits.device)
    else:
        universe, bits, alive = count_true(alive).expand(rows), bits.expand(rows, n), alive.expand(rows, n)
    step = max(1, POSITIONS // max(n, 1))
    parts = []
    for start in range(0, rows, step):
        some = bits[start : start + step]
        some = some.reshape(-1) if alive is None else some.masked_select(alive[start : start + step])
        parts.append(index.index_bytes(some, universe[start : start + step]))
    return index.IndexSizes(*map(np.concatenate, zip(*parts, strict=True)))
