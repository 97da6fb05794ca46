"""The sums of `core.reduce` and `core.inner`: all blocks of all rows of a tensor in one launch.

Products of float64 are rounded before they are added, as elsewhere: so no fused multiply-add.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.core.reduce import LANES, Cut

TILE = 1024
"""Numbers that a program adds up side by side."""


@triton.jit
def folded(v, ROWS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr):
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
    tl.store(out + unit, folded(acc, ROWS, LANES, LEVELS), mask=unit < units)


@triton.jit
def term(x, shift, mask, i, there, SHIFTED: tl.constexpr, MASKED: tl.constexpr):
    """x + shift where the mask is true, else 0."""
    v = tl.load(x + i, mask=there, other=0).to(tl.float64)
    if SHIFTED:
        v += tl.load(shift + i, mask=there, other=0).to(tl.float64)
    if MASKED:
        v = tl.where(tl.load(mask + i, mask=there, other=0) != 0, v, 0.0)
    return v


@triton.jit(do_not_specialize=["blocks", "units", "depth"])
def product_kernel(
    x, shift, other, mask, out, n, x_stride, shift_stride, other_stride, mask_stride, out_stride, plane,
    blocks, units, depth, SHIFTED: tl.constexpr, PAIRED: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, block = unit // blocks, unit % blocks
    i = (block * depth * LANES)[:, None] + tl.arange(0, LANES)[None, :]
    here = (unit < units)[:, None]
    x += row[:, None] * x_stride
    shift += row[:, None] * shift_stride
    other += row[:, None] * other_stride
    mask += row[:, None] * mask_stride
    a = term(x, shift, mask, i, here & (i < n), SHIFTED, MASKED)
    aa = a * a
    if PAIRED:
        b = term(other, other, mask, i, here & (i < n), False, MASKED)
        ab, bb = a * b, b * b
    for j in range(1, depth):
        at = i + j * LANES
        a = term(x, shift, mask, at, here & (at < n), SHIFTED, MASKED)
        aa += a * a
        if PAIRED:
            b = term(other, other, mask, at, here & (at < n), False, MASKED)
            ab += a * b
            bb += b * b
    out += row * out_stride + block
    tl.store(out, folded(aa, ROWS, LANES, LEVELS), mask=unit < units)
    if PAIRED:
        tl.store(out + plane, folded(ab, ROWS, LANES, LEVELS), mask=unit < units)
        tl.store(out + 2 * plane, folded(bb, ROWS, LANES, LEVELS), mask=unit < units)


def tiles(lanes: int) -> dict[str, int]:
    return {"ROWS": TILE // lanes, "LANES": lanes, "LEVELS": lanes.bit_length() - 1}


def block_sums(x: Tensor, cut: Cut) -> Tensor:
    """`[K, n]` -> `[K, blocks]` float64."""
    x, units = numbers(x), len(x) * cut.blocks
    out = torch.empty(len(x), cut.blocks, dtype=torch.float64, device=x.device)
    grid = (triton.cdiv(units, TILE // cut.lanes),)
    sum_kernel[grid](x, out, x.shape[1], x.stride(0), cut.blocks, units, cut.depth, **tiles(cut.lanes))
    return out


def block_products(given: list[Tensor | None], k: int, cut: Cut, out: Tensor) -> None:
    """x, shift, other and mask, `[K or 1, n]`: sums of a a, and of a b and b b where there is an other, into `out`.

    `out` is `[1 or 3, K, blocks or more]`. Short rows take as many lanes as long ones, zeros behind them, so that all
    layers of a model are served by few compiled kernels.
    """
    x, shift, other, mask = (None if y is None else numbers(y) for y in given)
    there = [x if y is None else y for y in (x, shift, other, mask)]
    units = k * cut.blocks
    grid = (triton.cdiv(units, TILE // LANES),)
    product_kernel[grid](
        *there, out, x.shape[1], *(0 if len(y) == 1 else y.stride(0) for y in there), out.stride(1), out.stride(0),
        cut.blocks, units, cut.depth, SHIFTED=shift is not None, PAIRED=other is not None, MASKED=mask is not None,
        **tiles(LANES), enable_fp_fusion=False,
    )  # fmt: skip


def numbers(x: Tensor) -> Tensor:
    """Rows whose entries lie side by side, booleans as bytes."""
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
