"""Many leaves in one row for each client, so that one operation does for all of them."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from sparing.core.tree import flat


def in_one_row(parts: Sequence[Tensor]) -> Tensor:
    """Leaves `[K, ...]` side by side in rows, `[K, n]`: not copied where they stand so already.

    >>> whole = torch.arange(10).view(2, 5)
    >>> in_one_row([whole[:, :1], whole[:, 1:].view(2, 2, 2)]).data_ptr() == whole.data_ptr()
    True
    """
    shapes = [x.shape for x in parts]
    first, k, rows = parts[0], shapes[0][0], [row_layout(shape) for shape in shapes]
    wide, dtype, at, item = sum(row[0] for row in rows), first.dtype, first.data_ptr(), first.element_size()
    if not any(first.stride()) and all(x.data_ptr() == at and not any(x.stride()) for x in parts):
        return first.as_strided((k, wide), (0, 0))  # one number, shown many times
    end = item * (first.storage_offset() + k * wide)
    standing = rows[0][0] > 0 and end <= first.untyped_storage().nbytes()
    for x, shape, (size, steps) in zip(parts, shapes, rows, strict=True):
        own = x.stride()
        alike = own[1:] == steps or all(n == 1 or a == b for n, a, b in zip(shape[1:], own[1:], steps, strict=True))
        apart = not alike or shape[0] != k or (k > 1 and own[0] != wide)
        if not standing or apart or x.data_ptr() != at or x.dtype != dtype:
            return torch.cat([flat(x) for x in parts], 1)
        at += item * size
    return first.as_strided((k, wide), (wide, 1))


@lru_cache(maxsize=1024)
def row_layout(shape: torch.Size) -> tuple[int, tuple[int, ...]]:
    """How many entries a row has, and its steps where they lie side by side."""
    return math.prod(shape[1:]), torch.empty(shape[1:], device="meta").stride()
