"""Normal numbers from hash words, by elementary arithmetic alone: the same bits in any row, on any device.

Library logarithms, sines, cosines and even roots differ in their last bits between devices, and between the middle and
the end of a row. Here the Box-Muller transform is written out in float64 additions, products, quotients and correctly
rounded roots, which are the same everywhere. The largest number that can come out is 8.6.
"""

import math
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.keys import hashes
from sparing.core.operation import operation
from sparing.core.tree import column, flat

Words = Callable[[Ctx, str, int, Tensor | None], Tensor]
"""(ctx, tag, n, values) -> n 64-bit words for each client, `[K, n]`. A secret source gives unrelated words for other
values `[K, ...]`; without values, words that the other end can draw too."""

BITS = 52
PROCESS = os.urandom(16).hex()
LOG = [2 / (2 * k + 1) for k in range(12)]  # log((1 + s) / (1 - s)) = s * sum LOG[k] s^2k
COS = [(-1) ** k / math.factorial(2 * k) for k in range(9)]
SIN = [(-1) ** k / math.factorial(2 * k + 1) for k in range(9)]


def keyed_words(ctx: Ctx, tag: str, n: int, values: Tensor | None = None) -> Tensor:
    """Known to everyone who knows the seed: for simulations."""
    return hashes(ctx.keys(tag), n)


def fresh_words(ctx: Ctx, tag: str, n: int, values: Tensor | None = None) -> Tensor:
    """From the operating system: nobody can draw them again, but both ends in this process what needs no values."""
    if values is None:
        return hashes(ctx.keys(f"{PROCESS}/{tag}"), n)
    k = len(ctx.ids)
    return torch.frombuffer(bytearray(os.urandom(8 * k * n)), dtype=torch.int64).reshape(k, n).to(ctx.device)


def gaussian_noise(words: Words, ctx: Ctx, tag: str, x: Tensor, scale_K: Tensor) -> Tensor:
    """Normal noise for the values x `[K, *shape]`, of each client's standard deviation: float64, drawn for both."""
    about = torch.cat([flat(x).double(), scale_K.double()[:, None]], dim=1)
    return standard_normal(words, ctx, tag, x[0].numel(), about).reshape(x.shape).mul_(column(scale_K.double(), x))


def standard_normal(words: Words, ctx: Ctx, tag: str, n: int, values: Tensor | None = None) -> Tensor:
    """`[K, n]` float64, independent standard normal numbers."""
    if n == 0:
        return torch.zeros(len(ctx.ids), 0, dtype=torch.float64, device=ctx.device)
    drawn = words(ctx, tag, n + n % 2, values)
    return torch.cat([normals_from_words(row[None], n) for row in drawn])


def normals_from_words(words: Tensor, n: int) -> Tensor:
    """Pairs of words become pairs of normal numbers: sqrt(-2 log u) times the cosine and the sine of an angle."""
    first, second = words.chunk(2, dim=1)
    radius = exact_root(-2 * _log(_unit_interval(first)))
    turn = (_unit_interval(second) - 0.5) * (
        math.pi / 2
    )  # an eighth of a circle either way; two more bits say which quarter
    square = turn * turn
    cos, sin = _power_series(COS, square), _power_series(SIN, square).mul_(turn)
    quarter = second & 3
    swapped, left, below = quarter % 2 == 1, (quarter == 1) | (quarter == 2), quarter >= 2
    x, y = torch.where(swapped, sin, cos), torch.where(swapped, cos, sin)
    x, y = torch.where(left, -x, x), torch.where(below, -y, y)
    return torch.cat([radius * x, radius * y], dim=1)[:, :n]


def _unit_interval(words: Tensor) -> Tensor:
    """In (0, 1), from the top bits; exact."""
    return (((words >> (64 - BITS)) & ((1 << BITS) - 1)).double() + 0.5) * 2.0**-BITS


def _log(u: Tensor) -> Tensor:
    """Of numbers in (0, 1), to 1e-14."""
    m, e = torch.frexp(u)
    low = m < math.sqrt(0.5)
    m, e = torch.where(low, 2 * m, m), e.double() - low.double()
    s = (m - 1) / (m + 1)
    return _power_series(LOG, s * s).mul_(s) + e * math.log(2)


@operation
def exact_root(x: Tensor) -> Tensor:
    """Correctly rounded, as NumPy's is; torch's own is not always."""
    return torch.from_numpy(np.sqrt(x.cpu().numpy())).to(x.device)


def _power_series(c: list[float], x: Tensor) -> Tensor:
    """c[0] + c[1] x + c[2] x^2 + ..., each product and sum a pass of its own, so that no device fuses them."""
    out = torch.full_like(x, c[-1])
    for a in reversed(c[:-1]):
        out.mul_(x).add_(a)
    return out
