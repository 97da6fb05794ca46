"""Sums over clients of how far they are from a model, and of its squares, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, BLOCK = 16, 128


@triton.jit
def spread_kernel(x, model, sums, squares, n, stride, K, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    origin = tl.load(model + i, mask=i < n, other=0.0).to(tl.float64)
    total, square = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for first in range(0, K, ROWS):
        k = first + tl.arange(0, ROWS)[:, None]
        inside = (k < K) & (i < n)[None, :]
        value = tl.load(x + k.to(tl.int64) * stride + i[None, :], mask=inside, other=0.0).to(tl.float64)
        away = tl.where(inside, value - origin[None, :], 0.0)
        total += tl.sum(away, 0)
        square += tl.sum(away * away, 0)
    tl.store(sums + i, total, mask=i < n)
    tl.store(squares + i, square, mask=i < n)


def spread(x: Tensor, model: Tensor, sums: Tensor, squares: Tensor) -> None:
    """`x [K, n]` and `model [n]` -> sums and squares of x - model over the clients, float64 `[n]`, written in place."""
    x, model = x if x.stride(1) == 1 else x.contiguous(), model.contiguous()
    grid = (triton.cdiv(x.shape[1], BLOCK),)
    spread_kernel[grid](x, model, sums, squares, x.shape[1], x.stride(0), len(x), ROWS=ROWS, BLOCK=BLOCK)


def spreads(xs: list[Tensor], models: list[Tensor]) -> Tensor:
    """Of many tensors side by side: `[2, n]` float64; put in one row, since a launch takes longer than a copy."""
    x, model = torch.cat(xs, 1), torch.cat(models)
    out = torch.empty(2, x.shape[1], dtype=torch.float64, device=x.device)
    if x.numel():
        spread(x, model, *out)
    return out
