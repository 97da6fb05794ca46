"""The sums of `core.reduce` and `core.inner`: all blocks of all rows of a tensor in one launch.

Products of float64 are rounded before they are added, as elsewhere: so no fused multiply-add.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.core.reduce import DEPTH, LANES, RowBlocks, row_blocks

TILE = 1024
"""Numbers that a program adds up side by side."""


@triton.jit
def fold_halves(v, ROWS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr):
    """`[ROWS, LANES]` -> `[ROWS]`, by halves."""
    for level in tl.static_range(LEVELS):
        v = tl.reshape(v, (ROWS, 2, LANES >> (level + 1)))
        low, high = tl.split(tl.permute(v, (0, 2, 1)))
        v = low + high
    return tl.reshape(v, (ROWS,))


@triton.jit(do_not_specialize=["blocks", "units", "depth"])
def sum_kernel(
    x, out, n, stride, blocks, units, depth,
    ROWS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = ((unit % blocks) * depth * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    x += (unit // blocks)[:, None] * stride
    here = (unit < units)[:, None]
    acc = tl.load(x + i, mask=here & (i < n), other=0).to(tl.float64)
    for j in range(1, depth):
        at = i + j * LANES
        acc += tl.load(x + at, mask=here & (at < n), other=0).to(tl.float64)
    tl.store(out + unit, fold_halves(acc, ROWS, LANES, LEVELS), mask=unit < units)


@triton.jit
def shifted_term(x, shift, mask, i, there, SHIFTED: tl.constexpr, MASKED: tl.constexpr):
    """x + shift where the mask is true, else 0."""
    v = tl.load(x + i, mask=there, other=0).to(tl.float64)
    if SHIFTED:
        v += tl.load(shift + i, mask=there, other=0).to(tl.float64)
    if MASKED:
        v = tl.where(tl.load(mask + i, mask=there, other=0) != 0, v, 0.0)
    return v


@triton.jit(do_not_specialize=["blocks", "units"])
def dot_kernel(
    x, shift, other, mask, table, out, x_stride, shift_stride, other_stride, mask_stride, out_stride, plane,
    blocks, units, SHIFTED: tl.constexpr, PAIRED: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, block, here = unit // blocks, unit % blocks, unit < units
    i = tl.load(table + block, mask=here, other=0)[:, None] + tl.arange(0, LANES)[None, :]
    stop = tl.load(table + blocks + block, mask=here, other=0)[:, None]
    x += row[:, None] * x_stride
    shift += row[:, None] * shift_stride
    other += row[:, None] * other_stride
    mask += row[:, None] * mask_stride
    a = shifted_term(x, shift, mask, i, i < stop, SHIFTED, MASKED)
    aa = a * a
    if PAIRED:
        b = shifted_term(other, other, mask, i, i < stop, False, MASKED)
        ab, bb = a * b, b * b
    for j in range(1, DEPTH):
        at = i + j * LANES
        a = shifted_term(x, shift, mask, at, at < stop, SHIFTED, MASKED)
        aa += a * a
        if PAIRED:
            b = shifted_term(other, other, mask, at, at < stop, False, MASKED)
            ab += a * b
            bb += b * b
    out += row * out_stride + tl.load(table + 2 * blocks + block, mask=here, other=0)
    tl.store(out, fold_halves(aa, ROWS, LANES, LEVELS), mask=here)
    if PAIRED:
        tl.store(out + plane, fold_halves(ab, ROWS, LANES, LEVELS), mask=here)
        tl.store(out + 2 * plane, fold_halves(bb, ROWS, LANES, LEVELS), mask=here)


def tile_sizes(lanes: int) -> dict[str, int]:
    return {"ROWS": TILE // lanes, "LANES": lanes, "LEVELS": lanes.bit_length() - 1}


def sum_blocks(x: Tensor, cut: RowBlocks) -> Tensor:
    """`[K, n]` -> `[K, blocks]` float64."""
    x, units = as_numbers(x), len(x) * cut.blocks
    out = torch.empty(len(x), cut.blocks, dtype=torch.float64, device=x.device)
    grid = (triton.cdiv(units, TILE // cut.lanes),)
    sum_kernel[grid](x, out, x.shape[1], x.stride(0), cut.blocks, units, cut.depth, **tile_sizes(cut.lanes))
    return out


@lru_cache(maxsize=64)
def table_of(lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Of every block of these stretches its first entry, where its stretch ends, and the place of its sum: `[3, B]`.

    Sums of a stretch stand side by side, in as many places as the longest one needs: that is the second.
    """
    size = LANES * DEPTH
    most, rows, at = max(row_blocks(max(n, 1)).blocks for n in lengths), [], 0
    for s, n in enumerate(lengths):
        rows += [(at + i, at + n, s * most + i // size) for i in range(0, n, size)]
        at += n
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).T.contiguous().to(device), most


def block_products(given: list[Tensor | None], k: int, lengths: tuple[int, ...]) -> Tensor:
    """x, shift, other and mask, `[K or 1, n]` in stretches: sums of a a, and of a b and b b where there is an other.

    `[1 or 3, K, stretches, blocks]`. Short stretches and blocks count as full ones, zeros behind them.
    """
    x, shift, other, mask = (None if y is None else as_numbers(y) for y in given)
    there = [x if y is None else y for y in (x, shift, other, mask)]
    table, most = table_of(lengths, x.device)
    out = torch.zeros(1 if other is None else 3, k, len(lengths), most, dtype=torch.float64, device=x.device)
    units = k * table.shape[1]
    if units:
        dot_kernel[(triton.cdiv(units, TILE // LANES),)](
            *there, table, out, *(0 if len(y) == 1 else y.stride(0) for y in there), out.stride(1), out.stride(0),
            table.shape[1], units, SHIFTED=shift is not None, PAIRED=other is not None, MASKED=mask is not None,
            **tile_sizes(LANES), DEPTH=DEPTH, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def as_numbers(x: Tensor) -> Tensor:
    """Rows whose entries lie side by side, booleans as bytes."""
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
