"""Sizes of many masks on a GPU, all of them side by side in one row for each client."""

from collections.abc import Callable

import numpy as np
import torch

from sparing.accel.cuda import takes_kernels
from sparing.accel.rows import in_one_row
from sparing.core.ops import to_host
from sparing.wire import count, index
from sparing.wire.count import Mask


def fast_index_sizes(masks: list[Mask]) -> Callable[[], list[index.IndexSizes]]:
    """`count.index_sizes`."""
    if not masks or not all(takes_kernels(mask.bits) for mask in masks):
        return count.index_sizes.plain(masks)
    from sparing.accel.cuda.gaps import gaps_of

    rows = max(x.shape[0] for mask in masks for x in (mask.bits, mask.alive) if x is not None)
    alive = None
    if any(mask.alive is not None for mask in masks):
        everywhere = torch.ones(1, 1, dtype=torch.bool, device=masks[0].bits.device)
        some = [everywhere if mask.alive is None else mask.alive for mask in masks]
        alive = torch.cat([x.expand(rows, mask.bits.shape[1]) for x, mask in zip(some, masks, strict=True)], dim=1)
    bits = in_one_row([mask.bits if mask.bits.shape[0] == rows else mask.bits.expand(rows, -1) for mask in masks])
    paid = any(mask.travels for mask in masks)
    later = to_host([gaps_of(bits, alive, tuple(mask.bits.shape[1] for mask in masks), paid)])

    def found() -> list[index.IndexSizes]:
        table = later()[0].numpy().T  # [4, masks, R]
        size = index.sizes_from(*table).size if paid else np.zeros_like(table[1])
        each = zip(masks, size, table[1], strict=True)
        return [index.IndexSizes(bytes_ if mask.travels else 0 * bytes_, kept) for mask, bytes_, kept in each]

    return found
