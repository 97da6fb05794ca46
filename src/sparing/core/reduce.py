"""Row-exact reductions: row k of a K-call has the bits of that row alone, on any device and any number of threads.

Library sums split long rows between threads and pick their order by shape, so their last bits wander. Here a sum is
a fixed order of elementwise float64 additions, which every device rounds alike: of each block of a row 16 stretches of
256 numbers are added one after the other, then the 256 by halves, and the blocks' sums are a row again. Whatever a
codec or a blend adds up over the entries of a client goes through `total`.

    >>> total(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([6.], dtype=torch.float64)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.operation import operation
from sparing.core.tree import cleared, flat

LANES, DEPTH = 256, 16
AT_ONCE = 1 << 22
"""Entries whose squares are in memory at once."""


@operation
def total(x: Tensor) -> Tensor:
    """Sum over all but the first axis: `[K, ...]` -> `[K]` float64."""
    x = flat(x)
    if x.numel() == 0:
        return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    x = _block_sums(x)
    while x.shape[1] > 1:
        x = _block_sums(x)
    return x[:, 0]


@operation
def count_true(x: Tensor) -> Tensor:
    """How many are true over all but the first axis: bool `[K, ...]` -> `[K]` int64."""
    return flat(x).sum(1)


@operation
def peaks(x: Tensor) -> Tensor:
    """The largest magnitude over all but the first axis, NaN if there is one, 0 of nothing: `[K, ...]` -> `[K]`."""
    return flat(x).abs().amax(1) if x[0].numel() else x.new_zeros(len(x))


class RowBlocks(NamedTuple):
    """A row in blocks of `depth` stretches of `lanes` numbers; what is missing of the last is zeros."""

    blocks: int
    depth: int
    lanes: int


def row_blocks(n: int) -> RowBlocks:
    lanes = min(LANES, 1 << (n - 1).bit_length())
    depth = min(DEPTH, -(-n // lanes))
    return RowBlocks(-(-n // (depth * lanes)), depth, lanes)


def _block_sums(x: Tensor) -> Tensor:
    """`[K, n]` -> `[K, blocks]` float64."""
    cut = row_blocks(n := x.shape[1])
    whole = n - n % (cut.depth * cut.lanes)
    if whole and whole < n:
        return torch.cat([_block_sums(x[:, :whole]), _block_sums(x[:, whole:])], dim=1)
    first, *others = x.reshape(len(x), cut.blocks, -1).split(cut.lanes, dim=2)
    out = first.to(torch.float64, copy=len(others) > 0)
    for other in others:
        out.narrow(2, 0, other.shape[2]).add_(other)
    while (wide := out.shape[2]) > 1:
        half = 1 << (wide - 1).bit_length() - 1
        low, high = out.split((half, wide - half), dim=2)
        if wide == 2 * half:
            out = low + high
        else:
            out = low.clone()
            out.narrow(2, 0, wide - half).add_(high)
    return out[..., 0]


@operation
def largest_in_rows(x: Tensor, k: int | Tensor) -> Tensor:
    """The k largest magnitudes of every row, ties to the lowest index, zeros never: `[K, n]` -> bool `[K, n]`.

    k is one number or one per row, `[K]`.

    >>> largest_in_rows(torch.tensor([[1.0, -3.0, 3.0, 0.0]]), 2)
    tensor([[False,  True,  True, False]])
    """
    k_K = torch.as_tensor(k, device=x.device).expand(x.shape[0]).clamp(0, x.shape[1])[:, None]
    most = int(k_K.max()) if k_K.numel() else 0
    if most == 0:
        return torch.zeros_like(x, dtype=torch.bool)
    size = x.abs()
    cut = size.topk(most, dim=1).values.gather(1, (k_K - 1).clamp(min=0))
    chosen = ~(size < cut)  # so that NaN is among them, and whoever receives it can refuse it
    spare = chosen.sum(dim=1, keepdim=True) - k_K
    if bool((spare > 0).any()):
        tied = size == cut
        chosen &= ~tied | (tied.cumsum(dim=1) <= tied.sum(dim=1, keepdim=True) - spare)
    return chosen & (size != 0) & (k_K > 0)


@operation
def keep_largest(values: list[Tensor], counts: list[int | Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Of many tensors `[K, ...]` the largest entries, so many of each, the same for all clients or `[K]`.

    Gives, of each tensor, which they are and the tensor with zeros in place of all others.
    """
    found = []
    for x, k in zip(values, counts, strict=True):
        mask = largest_in_rows(flat(x), k).view(x.shape)
        found.append((mask, cleared(x, mask)))
    return found


class Term(NamedTuple):
    """a = x + plus - minus and b = other, both zero where the mask is false; axis 0 of each is K or 1."""

    x: Tensor
    plus: Tensor | None = None
    minus: Tensor | None = None
    other: Tensor | None = None
    mask: Tensor | None = None


@operation
def dots(terms: list[Term], k: int) -> Tensor:
    """Sums of a a, or of a a, a b and b b where the terms have a b, of K rows of L terms: `[1 or 3, K, L]` float64.

    >>> dots([Term(torch.tensor([[3.0, 4.0]]), other=torch.tensor([[1.0, 0.0]]))], k=1).flatten()
    tensor([25.,  3.,  1.], dtype=torch.float64)
    """
    planes = 1 if terms[0].other is None else 3
    out = torch.empty(planes, k, len(terms), dtype=torch.float64, device=terms[0].x.device)
    for i, (x, plus, minus, other, mask) in enumerate(terms):
        step = max(1, AT_ONCE // max(math.prod(x.shape[1:]), 1))
        for at in (slice(j, min(j + step, k)) for j in range(0, k, step)):
            a = _rows_at(x, at).expand(at.stop - at.start, *x.shape[1:]).double()
            a = a if plus is None else a + _rows_at(plus, at).double()
            a = a if minus is None else a - _rows_at(minus, at).double()
            here = None if mask is None else _rows_at(mask, at)
            a = cleared(a, here)
            out[0, at, i] = total(a * a)
            if other is not None:
                b = cleared(_rows_at(other, at).double(), here)
                out[1, at, i], out[2, at, i] = total(a * b), total(b * b)
    return out


def _rows_at(x: Tensor, at: slice) -> Tensor:
    """Some rows, or the one that all have."""
    return x if x.shape[0] == 1 else x[at]
