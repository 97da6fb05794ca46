"""Truncated singular value decompositions of many matrices at once, going on from earlier ones.

A decomposition from nothing is exact: eigenvectors of the smaller Gram matrix, in float64. One that goes on from the
right vectors of a matrix that has since moved a little takes a step of subspace iteration and looks at what its
singular vectors miss of the matrix; where that is too much it takes another, and in the end the exact one. All of it
runs on one thread, so that its bits do not depend on how many there are.

    >>> m = torch.diag(torch.tensor([3.0, 2.0, 1.0]))[None]
    >>> exact_svd(m, 2).s
    tensor([[3., 2.]])
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.operation import operation
from sparing.core.threads import intra_op
from sparing.parts.factors import gram_of_rows

PROBES = 8
"""Random columns that join a warm start: what is new and orthogonal to all that was known would never be seen else."""
STEPS = 3
TOLERANCE = 0.015
"""The squared residual of the singular vectors may be so much of the squared error; the error itself was then measured
to lie within 3 % of the best (benchmarks/decompose.py)."""
FLOOR = 1e-6
"""And so much of the whole matrix: more than float32 rounding leaves."""
TINY = 1e-7
"""Singular values below this share of the largest are zero."""


class Svd(NamedTuple):
    """The r largest singular values of each matrix and their vectors."""

    u: Tensor  # [L, rows, r]
    s: Tensor  # [L, r], falling
    v: Tensor  # [L, columns, r]


@operation
def begins_anew(m: Tensor, rank: int) -> bool:
    """Whether an exact decomposition costs less than going on: the rank comes near the size of the matrix."""
    return 2 * (rank + PROBES) > min(m.shape[1:])


def renewed_svd(m: Tensor, rank: int, old: Tensor, probes: Callable[[], Tensor]) -> tuple[Svd, int]:
    """Of matrices `[L, rows, columns]`, and how many of them could not go on from `old`, their right vectors before."""
    with intra_op(1):
        if begins_anew(m, rank):
            return exact_svd(m, rank), 0
        found, good = _warm_started(m, old, probes())
        bad = (~good).nonzero()[:, 0]
        if len(bad):
            again = exact_svd(m[bad], rank)
            for x, y in zip(found, again, strict=True):
                x[bad] = y
        return found, len(bad)


def exact_svd(m: Tensor, rank: int) -> Svd:
    return exact_svds([m], [rank])[0]


def exact_svds(matrices: list[Tensor], ranks: list[int]) -> list[Svd]:
    """Of matrices `[L, rows, columns]` of several shapes."""
    with intra_op(1):
        tall = [upright(m) for m in matrices]
        right = strongest_eigenvectors([gram_of_rows(x.mT) for x in tall], ranks)
        return [_finished_svd(m, x, v) for m, x, v in zip(matrices, tall, right, strict=True)]


def upright(m: Tensor) -> Tensor:
    """The matrices, or their transposes where they are wide, in float64."""
    return (m.mT if m.shape[1] < m.shape[2] else m).double()


def _finished_svd(m: Tensor, x: Tensor, v: Tensor) -> Svd:
    """From the right vectors v of x, which is m or, where m is wide, its transpose."""
    u = x @ v
    s = torch.linalg.vector_norm(u, dim=1)
    none = s <= TINY * s[:, :1]
    u, s = u / s.masked_fill(none, torch.inf)[:, None], s.masked_fill(none, 0.0)
    return sided(m, u, s, v)


def sided(m: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Svd:
    u, v = (v, u) if m.shape[1] < m.shape[2] else (u, v)
    return Svd(u.to(m.dtype), s.to(m.dtype), v.to(m.dtype))


@operation
def strongest_eigenvectors(grams: list[Tensor], ranks: list[int]) -> list[Tensor]:
    """Eigenvectors of the largest eigenvalues, falling."""
    return [torch.linalg.eigh(x).eigenvectors.flip(2)[:, :, :rank] for x, rank in zip(grams, ranks, strict=True)]


def _warm_started(m: Tensor, old: Tensor, probes: Tensor) -> tuple[Svd, Tensor]:
    """Subspace iteration from `old` `[L, columns, r]` and a few columns more; also bool `[L]`: was it enough?

    A step is M^T M - shift: half of the smallest singular value kept, squared, taken away from all, sets the kept ones
    further apart from the rest.
    """
    rank, whole, v, step = old.shape[2], matrix_energy(m), old, 0
    while True:
        block = torch.cat([v, probes], dim=2)
        ahead = m @ block
        shift = ahead[:, :, :rank].square().sum(1).amin(1) / 2
        basis = torch.linalg.qr(m.mT @ ahead - shift[:, None, None] * block).Q
        q, r = torch.linalg.qr(m @ basis)
        x, s, yt = torch.linalg.svd(r)
        u, s, v = q @ x[:, :, :rank], s[:, :rank], basis @ yt.mT[:, :, :rank]
        step, missed = step + 1, whole - matrix_energy(s[:, None])
        good = _svd_residual(m, u, s, v, probes) <= TOLERANCE * missed + FLOOR * whole
        if bool(good.all()) or step == STEPS:
            return Svd(u, s, v), good


def _svd_residual(m: Tensor, u: Tensor, s: Tensor, v: Tensor, probes: Tensor) -> Tensor:
    """|M^T U - V S|^2 `[L]`, zero for true singular vectors; estimated from a few random mixtures of the columns."""
    mix = probes[:, : s.shape[1]]
    apart = m.mT @ (u @ mix) - v @ (s[:, :, None] * mix)
    return matrix_energy(apart) * s.shape[1] / matrix_energy(mix)


def matrix_energy(m: Tensor) -> Tensor:
    """Squared Frobenius norms `[L]` in float64."""
    return torch.linalg.vector_norm(m, dim=2).double().square().sum(1)
