"""Weighted sums of some rows of a float32 tensor, each added up in the order asked for."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

MANY, WIDE = 16, 256
"""Sums, and entries of each, that a program adds up."""


@triton.jit(do_not_specialize=["k", "m"])
def mix_kernel(x, index, weight, out, n, k, m, MANY: tl.constexpr, WIDE: tl.constexpr):
    i = tl.program_id(1).to(tl.int64) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(0) * MANY + tl.arange(0, MANY)
    acc = tl.zeros((MANY, WIDE), tl.float32)
    for j in range(m):
        w = tl.load(weight + row * m + j, mask=row < k, other=0.0)[:, None]
        v = tl.load(x + tl.load(index + j) * n + i, mask=i < n, other=0.0)[None, :]
        v, w = tl.broadcast(v, w)
        acc = tl.where(w != 0, tl.fma(v, w, acc), acc)
    at = row[:, None].to(tl.int64) * n + i[None, :]
    tl.store(out + at, acc, mask=(row < k)[:, None] & (i < n)[None, :])


def mixed_rows(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Rows `index` `[m]` of x `[rows, ...]` by weights `[K, m]` float32 -> `[K, ...]`; a weight of zero is left out."""
    out = torch.empty(len(weight), *x.shape[1:], dtype=x.dtype, device=x.device)
    if out.numel():
        k, m, n = *weight.shape, math.prod(x.shape[1:])
        grid = (triton.cdiv(k, MANY), triton.cdiv(n, WIDE))
        mix_kernel[grid](x.contiguous(), index, weight.contiguous(), out, n, k, m, MANY=MANY, WIDE=WIDE)
    return out
