"""The strongest components of K matrices at once: M ~ sum of s u v^T, by a fixed number of steps of subspace iteration.

Every sum is exact (`dead_zone`), so row k of a K-call has the bits of that row alone; the small decompositions in
between are LAPACK's, one matrix at a time on one thread. Numbers are rounded to some 20 bits on the way: vectors are
orthonormal to about 1e-5, far better than any code they are sent in.

    >>> m = torch.diag(torch.tensor([3.0, 2.0, 1.0]))[None]
    >>> strongest_subspace(m, torch.eye(3)[None], 2, passes=1).s
    tensor([[3., 2.]], dtype=torch.float64)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.operation import operation
from sparing.core.threads import intra_op
from sparing.parts.code.dead_zone import digits, rounded

TINY = 2.0**-32
"""Eigenvalues below this share of the largest are errors of rounding."""


class Components(NamedTuple):
    """Strongest first."""

    u: Tensor  # [K, rows, r] float64
    s: Tensor  # [K, r]
    v: Tensor  # [K, columns, r]


def strongest_subspace(m: Tensor, start: Tensor, rank: int, passes: int) -> Components:
    """Of matrices `[K, rows, columns]`, from a guess of the right vectors `[K, columns, at least r]`."""
    bits = digits(max(m.shape[1:]))
    m, x, y = rounded(m.double(), bits), start.double(), m.new_zeros(())
    for _ in range(passes):
        y = rounded(m @ rounded(x, bits), bits)
        turn, square = spectrum(y)
        y = rounded(divided(y @ rounded(turn, bits), square), bits)
        x = rounded(m.mT @ y, bits)
    turn, square = (z[..., :rank] for z in spectrum(x))
    turn = rounded(turn, bits)
    return Components(y @ turn, square.sqrt(), divided(x @ turn, square))


def divided(x: Tensor, square: Tensor) -> Tensor:
    """Columns `[K, n, r]` of these squared lengths `[K, r]` made unit vectors; zero where they have none."""
    size = square.sqrt()[:, None]
    return torch.where(size == 0, 0.0, x / torch.where(size == 0, 1.0, size))


def spectrum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvectors `[K, r, r]` and eigenvalues `[K, r]` of X^T X, strongest first; NaN for what is not finite."""
    vectors, values = eigen_pairs(x.mT @ x)
    return vectors, torch.where(values <= TINY * values[:, :1], 0.0, values)


@operation
def eigen_pairs(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Of symmetric matrices `[K, r, r]`, largest first; NaN for what is not finite."""
    with intra_op(1):
        found = [eigen_pair(one) for one in gram.cpu()]
    vectors, values = (torch.stack(some).to(gram.device) for some in zip(*found, strict=True))
    return vectors, values


def eigen_pair(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Of one matrix on the host."""
    if not bool(gram.isfinite().all()):
        return torch.zeros_like(gram), torch.full_like(gram[0], torch.nan)
    value, vector = torch.linalg.eigh(gram.clone())
    return vector.flip(1), value.flip(0)
