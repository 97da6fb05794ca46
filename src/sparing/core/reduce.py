"""Row-exact reductions: row k of a K-call has the bits of that row alone, on any device and any number of threads.

Library sums split long rows between threads and pick their order by shape, so their last bits wander. Here a sum is
a fixed order of elementwise float64 additions, which every device rounds alike: of each block of a row 16 stretches of
256 numbers are added one after the other, then the 256 by halves, and the blocks' sums are a row again.

    >>> total(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([6.], dtype=torch.float64)
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.gpu import ready

LONG = 1 << 18
"""Rows of so many numbers are worth a look at which of them matter, on the CPU."""
SAMPLE = 1 << 14
BLOCK = 1 << 16
"""Numbers that stay in the cache together."""
LANES, DEPTH = 256, 16


def total(x: Tensor) -> Tensor:
    """Sum over all but the first axis: `[K, ...]` -> `[K]` float64."""
    x = x.reshape(x.shape[0], -1)
    if x.numel() == 0:
        return torch.zeros(x.shape[0], dtype=torch.float64, device=x.device)
    x = block_sums(x)
    while x.shape[1] > 1:
        x = block_sums(x)
    return x[:, 0]


class Cut(NamedTuple):
    """A row in blocks of `depth` stretches of `lanes` numbers; what is missing of the last is zeros."""

    blocks: int
    depth: int
    lanes: int


def cut_of(n: int) -> Cut:
    lanes = min(LANES, 1 << (n - 1).bit_length())
    depth = min(DEPTH, -(-n // lanes))
    return Cut(-(-n // (depth * lanes)), depth, lanes)


def block_sums(x: Tensor) -> Tensor:
    """`[K, n]` -> `[K, blocks]` float64."""
    cut = cut_of(n := x.shape[1])
    if ready(x):
        from sparing.core.gpu import sums

        return sums.block_sums(x, cut)
    whole = n - n % (cut.depth * cut.lanes)
    if whole and whole < n:
        return torch.cat([block_sums(x[:, :whole]), block_sums(x[:, whole:])], dim=1)
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


def largest(x: Tensor, k: int | Tensor) -> Tensor:
    """The k largest magnitudes of every row, ties to the lowest index, zeros never: `[K, n]` -> bool `[K, n]`.

    k is one number or one per row, `[K]`.

    >>> largest(torch.tensor([[1.0, -3.0, 3.0, 0.0]]), 2)
    tensor([[False,  True,  True, False]])
    """
    if ready(x) and x.dtype == torch.float32:
        k = k if isinstance(k, Tensor) else torch.full((1,), k, device=x.device)
        return largest_of_each(x, (x.shape[1],), k.expand(x.shape[0])[:, None])
    k_K = torch.as_tensor(k, device=x.device).expand(x.shape[0]).clamp(0, x.shape[1])[:, None]
    most = int(k_K.max()) if k_K.numel() else 0
    if most == 0:
        return torch.zeros_like(x, dtype=torch.bool)
    if x.device.type == "cpu" and x.shape[1] >= LONG:
        long = torch.zeros_like(x, dtype=torch.bool)
        for row, out, k in zip(x, long, k_K[:, 0].tolist(), strict=True):
            out[places_of_largest(row, int(k))] = True
        return long
    size = x.abs()
    cut = size.topk(most, dim=1).values.gather(1, (k_K - 1).clamp(min=0))
    chosen = ~(size < cut)  # so that NaN is among them, and whoever receives it can refuse it
    spare = chosen.sum(dim=1, keepdim=True) - k_K
    if bool((spare > 0).any()):
        tied = size == cut
        chosen &= ~tied | (tied.cumsum(dim=1) <= tied.sum(dim=1, keepdim=True) - spare)
    return chosen if bool((cut > 0).all()) else chosen & (size != 0)


def largest_of_each(x: Tensor, lengths: tuple[int, ...], k_KS: Tensor) -> Tensor:
    """The same of every stretch of the rows, each with k of its own, `[K, S]` int64.

    >>> largest_of_each(torch.tensor([[1.0, -3.0, 3.0, 0.0]]), (1, 3), torch.tensor([[1, 1]]))
    tensor([[ True,  True, False, False]])
    """
    if ready(x) and x.dtype == torch.float32:
        return kept_of_each(x, lengths, k_KS)[0]
    if len(lengths) == 1:
        return largest(x, k_KS[:, 0])
    parts = zip(x.split(lengths, dim=1), k_KS.unbind(1), strict=True)
    return torch.cat([largest(part, k_K) for part, k_K in parts], dim=1)


def kept_of_each(x: Tensor, lengths: tuple[int, ...], k_KS: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and x with zeros in place of all others.

    >>> kept_of_each(torch.tensor([[1.0, -3.0, 3.0, 0.0]]), (1, 3), torch.tensor([[1, 1]]))[1]
    tensor([[ 1., -3.,  0.,  0.]])
    """
    if ready(x) and x.dtype == torch.float32:
        from sparing.core.gpu import select

        return select.largest(x, lengths, k_KS)
    mask = largest_of_each(x, lengths, k_KS)
    return mask, torch.where(mask, x, 0)


def places_of_largest(row: Tensor, k: int) -> Tensor:
    """The same of one long row, as positions: looked for among the few above a bound that a sample suggests.

    >>> places_of_largest(torch.tensor([4.0, -1.0, -3.0]), 2)
    tensor([0, 2])
    """
    if k == 0:
        return torch.zeros(0, dtype=torch.int64)
    sample = row[:: len(row) // SAMPLE | 1].abs()  # an odd step, lest it keep to a few columns of a matrix
    hoped = int(1.3 * k * len(sample) / len(row)) + 30
    places = places_from(row, sample.topk(hoped).values[-1]) if hoped < len(sample) else None
    if places is None or len(places) < k or bool((cut := kth(row[places].abs(), k)).isnan()):
        places, cut = torch.arange(len(row)), kth(row.abs(), k)
    size = row[places].abs()
    chosen = ~(size < cut) & (size != 0)
    tied = (size == cut).nonzero()[:, 0]
    spare = int(chosen.sum()) - k
    if spare > 0 and len(tied):
        chosen[tied[-spare:]] = False
    return places[chosen]


def kth(size: Tensor, k: int) -> Tensor:
    """The k-th largest, NaN above all."""
    return size.kthvalue(len(size) - k + 1).values


def places_from(row: Tensor, bound: Tensor) -> Tensor:
    """Where a magnitude is not below the bound; a block at a time."""
    found = [true_at(~(some.abs() < bound)) + i * BLOCK for i, some in enumerate(row.split(BLOCK))]
    return torch.from_numpy(np.concatenate(found))


def scarce(mask: Tensor) -> Tensor | None:
    """Where a long row of booleans is true, if that is so seldom that going there alone is faster.

    >>> scarce(torch.tensor([True, False])) is None
    True
    """
    if mask.device.type != "cpu" or len(mask) < LONG or 8 * np.count_nonzero(mask.numpy()) > len(mask):
        return None
    return torch.from_numpy(true_at(mask))


def true_at(mask: Tensor) -> np.ndarray:
    """`nonzero` of a row on the CPU, which NumPy finds several times as fast."""
    return np.flatnonzero(mask.numpy())
