"""How many bytes the leaves of K parcels take: in closed form, or by writing those that are tight."""

import math
from typing import cast

import torch
from torch import Tensor

from sparing.core.parcel import Leaf, Parcel, clients, row
from sparing.core.wire import index
from sparing.core.wire.index import Number, packed_size
from sparing.core.wire.section import CODES, write_masks, write_values

POSITIONS = 1 << 25
"""Mask entries whose index sizes are worked out together."""


def leaf_sizes(name: str, leaf: Leaf) -> tuple[Number, Number]:
    """Bytes of one leaf's values and of its indices, a byte apiece for their codes left out.

    Each is a number where it is the same for all clients and no mask is to be counted for it, else `[1]` or `[K]`.
    """
    if leaf.tight:
        return written(name, leaf)
    shape = leaf.value.shape[1:]
    n = math.prod(shape)
    indices: Number = 0
    alive, count = leaf.scope, cast(Number, n)
    if alive is not None:
        alive = alive.expand(-1, *shape).reshape(len(alive), n)
        count = alive.sum(1)
        if leaf.told:
            indices = indices + index_sizes(alive).size
    for keep in leaf.keep:
        if keep.shape[1:] == shape:
            universe = None if alive is None else count
            one, count = index_sizes(keep.reshape(len(keep), n), alive, universe)
        else:
            one, count = index_sizes(keep.flatten(1)).size, None
        indices = indices + one
        wide = keep.expand(-1, *shape).reshape(len(keep), n)
        alive = wide if alive is None else alive & wide
        count = alive.sum(1) if count is None else count
    if leaf.value.dtype != CODES:
        return count * leaf.value.element_size(), indices
    width = leaf.bits.reshape(-1).long() if isinstance(leaf.bits, Tensor) else leaf.bits
    if isinstance(width, Tensor) and isinstance(count, Tensor):
        width = width.to(count.device)
    return packed_size(count, width), indices


def written(name: str, leaf: Leaf) -> tuple[Number, Number]:
    """The same of a tight leaf: write it and see."""
    found = []
    parcel = Parcel({name: leaf}, {})
    for k in range(clients(parcel)):
        one = row(parcel, k).leaves[name]
        masks, alive = write_masks(one)
        values = write_values(name, one, alive)
        found.append(
            (sum(map(len, values)) - (leaf.value.dtype == CODES), sum(map(len, masks)) - len(leaf.keep) - leaf.told)
        )
    table = torch.tensor(found, dtype=torch.int64).reshape(-1, 2)
    value, indices = table.unbind(1)
    return value, indices


def index_sizes(mask: Tensor, alive: Tensor | None = None, universe: Tensor | None = None) -> index.Sizes:
    """Of bool `[R, n]`, counting only positions alive, `universe` `[R]` of them; a stretch of rows at a time."""
    rows, n = max(len(mask), 1 if alive is None else len(alive)), mask.shape[1]
    if alive is None or universe is None:
        universe = torch.full((rows,), n, device=mask.device)
    else:
        mask, alive, universe = mask.expand(rows, n), alive.expand(rows, n), universe.expand(rows)
    step = max(1, POSITIONS // max(n, 1))
    parts = []
    for start in range(0, rows, step):
        some = mask[start : start + step]
        bits = some.reshape(-1) if alive is None else some.masked_select(alive[start : start + step])
        parts.append(index.sizes(bits, universe[start : start + step]))
    return index.Sizes(*map(torch.cat, zip(*parts, strict=True)))


def on_host(found: list[Number]) -> list[Number]:
    """The same on the CPU; all that lies on a device comes in one copy."""
    away = [x for x in found if isinstance(x, Tensor) and x.device.type != "cpu"]
    if not away:
        return found
    here = iter(torch.cat(away).cpu().split([len(x) for x in away]))
    return [next(here) if isinstance(x, Tensor) and x.device.type != "cpu" else x for x in found]
