"""What goes up of a part of a model: the difference from what came down, zero outside the mask, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.core.tree import flat

BLOCK = 4096


@triton.jit
def cut_kernel(
    x, base, mask, out, n, x_row, base_row, mask_row, out_row, BASED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    i, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    here = i < n
    value = tl.load((x + row * x_row) + i, mask=here)
    if BASED:
        value -= tl.load((base + row * base_row) + i, mask=here)
    keep = tl.load((mask + row * mask_row) + i, mask=here) != 0
    tl.store((out + row * out_row) + i, tl.where(keep, value, 0.0), mask=here)


def cut(parts: list[tuple[Tensor, Tensor | None, Tensor]]) -> list[Tensor]:
    """Of each (x `[K, ...]`, base, mask), float32, `where(mask, x - base, 0)`; they stand side by side in rows."""
    k, sizes = parts[0][0].shape[0], [x[0].numel() for x, _, _ in parts]
    whole = torch.empty(k, sum(sizes), device=parts[0][0].device)
    outs = whole.split(sizes, 1)
    for (x, base, mask), out in zip(parts, outs, strict=True):
        rows = [flat(y.contiguous()) for y in (x, x if base is None else base, mask.view(torch.uint8))]
        steps = [0 if len(y) == 1 else y.stride(0) for y in rows]
        grid = (triton.cdiv(out.shape[1], BLOCK), k)
        cut_kernel[grid](*rows, out, out.shape[1], *steps, out.stride(0), BASED=base is not None, BLOCK=BLOCK)
    return [out.view(x.shape) for out, (x, _, _) in zip(outs, parts, strict=True)]
