"""Sums over clients of how far they are from a model, and of its squares, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.cuda.places import block_of, in_rows, places_of
from sparing.accel.cuda.stretches import stretch_blocks

ROWS, BLOCK = 16, 128


@triton.jit
def spread_kernel(table, stretch, start, stop, first, out, n, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    s, i, j, _, end = block_of(stretch, start, stop, first, tl.program_id(0), BLOCK)
    here, at = i < end, table + s * 4
    x, step = tl.load(at).to(tl.pointer_type(tl.float32)), tl.load(at + 2)
    origin = tl.load(tl.load(at + 1).to(tl.pointer_type(tl.float32)) + j, mask=here, other=0.0).to(tl.float64)
    total, square = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for row in range(0, K, ROWS):
        k = row + tl.arange(0, ROWS)[:, None]
        inside = (k < K) & here[None, :]
        value = tl.load(x + k.to(tl.int64) * step + j[None, :], mask=inside, other=0.0).to(tl.float64)
        away = tl.where(inside, value - origin[None, :], 0.0)
        total += tl.sum(away, 0)
        square += tl.sum(away * away, 0)
    tl.store(out + i, total, mask=here)
    tl.store(out + n + i, square, mask=here)


def spread_sums(pairs: list[tuple[Tensor, Tensor]], k: int) -> Tensor:
    """Of tensors of K clients, `[K or 1, ...]` float32, and the model's, side by side: `[2, n]` float64."""
    sizes, device = tuple(origin.numel() for _, origin in pairs), pairs[0][0].device
    tables, out = stretch_blocks(sizes, BLOCK, device), torch.zeros(2, sum(sizes), dtype=torch.float64, device=device)
    if out.numel():
        rows = [[in_rows(x) for x in pair] for pair in pairs]
        spread_kernel[(len(tables.stretch),)](
            places_of(rows, device), *tables, out, out.shape[1], k, ROWS=ROWS, BLOCK=BLOCK
        )
    return out
