"""Many tensors in one launch: a table tells a kernel where each of them begins."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.rows import row_layout
from sparing.core.ops import place


def in_rows(x: Tensor) -> Tensor:
    """`[K, ...]` with the entries of every row side by side; the same tensor where they are."""
    return x if x.stride()[1:] == row_layout(x.shape)[1] else x.contiguous()


def places_of(columns: list[list[Tensor | None]], device: torch.device) -> Tensor:
    """Of tensors in rows, a list of them for each stretch of a kernel: where each begins, 0 for one that is missing,
    and how far the rows of each are apart, 0 where all clients share one; int64 `[S, 2 * tensors]`.

    The tensors must be kept until the kernel is launched.
    """
    begin = [[0 if x is None else x.data_ptr() for x in some] for some in columns]
    steps = [[0 if x is None or x.shape[0] == 1 else x.stride(0) for x in some] for some in columns]
    return place(torch.tensor([a + b for a, b in zip(begin, steps, strict=True)]), device)


@triton.jit
def block_of(stretch, start, stop, first, b, BLOCK: tl.constexpr):
    """To which tensor a block belongs, its columns among all and in this tensor, and where that begins and ends."""
    s = tl.load(stretch + b)
    opening = tl.load(first + s)
    begin, end = tl.load(start + opening), tl.load(stop + b)
    j = (b - opening) * BLOCK + tl.arange(0, BLOCK)
    return s, begin + j, j, begin, end
