"""Rounding: codes of a quantiser with a dead zone, and numbers so short that sums of their products are exact.

Such a sum is exact in float64 while all terms lie on one power-of-two grid and it stays below 2^53 steps. So matrices
`rounded` to few enough `digits` have products whose bits depend on nothing but the numbers: not on who else is in the
batch, nor on threads, nor on the device.

    >>> codes_of(torch.tensor([[-1.7, 0.6, 0.7]]), torch.tensor([1.0])).tolist()
    [[-2, 0, 1]]
"""

import torch
from torch import Tensor

from sparing.core.operation import operation
from sparing.core.reduce import peaks
from sparing.core.tree import column

TOP = 127
"""The largest code."""
DEAD = 0.15
"""A value between two codes takes the one nearer to zero up to so far beyond the middle: fewer bytes at equal error."""


@operation
def codes_of(values: Tensor, step_K: Tensor) -> Tensor:
    """`[K, ...]` -> int8 codes; code times step is the value. The error is never larger than the value itself."""
    step = column(torch.where(step_K > 0, step_K, 1.0), values)
    size = torch.floor(values.abs() / step + (0.5 - DEAD)).clamp(max=TOP)
    return torch.where(values < 0, -size, size).to(torch.int8)


@operation
def values_of_codes(codes: Tensor, step_K: Tensor) -> Tensor:
    """Code times step, in the step's precision."""
    return codes * column(step_K, codes)


def reaching(step_K: Tensor, values: Tensor) -> Tensor:
    """The step as float32 `[K]`, longer where the largest code would not reach the largest value."""
    return torch.maximum(step_K, peaks(values) * (1 / TOP)).float()


def digits(terms: int) -> int:
    """How many bits each of two factors may have, so that so many products add up exactly.

    >>> digits(1), digits(4096), digits(4097)
    (26, 20, 20)
    """
    return (53 - (max(terms, 1) - 1).bit_length()) // 2


@operation
def rounded(x: Tensor, bits: int) -> Tensor:
    """`[K, ...]` float64 -> multiples of a power of two, of which no number of the row is more than 2^bits."""
    if x[0].numel() == 0:
        return x
    axes = tuple(range(1, x.ndim))
    peak = torch.maximum(x.amax(axes), -x.amin(axes))
    peak = torch.where(peak == 0, 1.0, peak)
    step = column(peak / torch.frexp(peak).mantissa * 2.0**-bits, x)
    return (x / step).round_().mul_(step)
