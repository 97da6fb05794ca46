"""Factors of K clients multiplied out: every number is one sum in a fixed order, whoever else is in the call."""

import torch
import triton
import triton.language as tl
from torch import Tensor

SIDE, DEPTH = 64, 16


@triton.jit
def factor_kernel(
    a, b, out, m, n, r, HIGH: tl.constexpr, WIDE: tl.constexpr, SIDE: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Rows are (filter, height), columns (channel, width), as in `parts.factors`."""
    k = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    rows, columns = m * HIGH, n * WIDE
    up, along = row // HIGH, row % HIGH
    a += k * rows * r
    b += k * columns * r
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for start in range(0, r, DEPTH):
        c = start + tl.arange(0, DEPTH)
        left, right = (row < rows)[:, None] & (c < r)[None], (c < r)[:, None] & (column < columns)[None]
        x = tl.load(a + (up * r * HIGH + along)[:, None] + c[None] * HIGH, mask=left, other=0.0)
        y = tl.load(b + c[:, None] * columns + column[None], mask=right, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    place = ((up * n * HIGH + along) * WIDE)[:, None] + (column // WIDE * (HIGH * WIDE) + column % WIDE)[None]
    tl.store(out + k * rows * columns + place, total, mask=(row < rows)[:, None] & (column < columns)[None])


def factor_products(a_K: Tensor, b_K: Tensor) -> Tensor:
    """`parts.factors.factor_product` of float32 factors."""
    k, m, r, high, _ = (*a_K.shape, 1, 1)[:5]
    n, wide = b_K.shape[2], b_K.shape[-1] if b_K.ndim == 5 else 1
    shape = (k, m, n, high, wide) if a_K.ndim == 5 else (k, m, n)
    out = torch.empty(shape, dtype=a_K.dtype, device=a_K.device)
    grid = (triton.cdiv(n * wide, SIDE), triton.cdiv(m * high, SIDE), k)
    factor_kernel[grid](a_K.contiguous(), b_K.contiguous(), out, m, n, r, HIGH=high, WIDE=wide, SIDE=SIDE, DEPTH=DEPTH)
    return out
