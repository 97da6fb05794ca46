"""The strongest components of K matrices at once: M ~ sum of s u v^T.

A matrix of few columns is decomposed by its squares. A larger one goes by subspace iteration: it is read in whole
numbers of 15 bits, and a guess of its right vectors is refined in 8, since products of bytes cost next to nothing where
the processor has them; vectors are orthonormal, and a matrix is right, to about 1e-4 of the largest entry, far better
than any code they are sent in. Every sum is exact (`dead_zone`), so row k of a K-call has the bits of that row alone;
the small decompositions in between are LAPACK's, one matrix at a time on one thread.

    >>> every_component(torch.diag(torch.tensor([3.0, 2.0, 1.0]))[None], 2).s
    tensor([[3., 2.]], dtype=torch.float64)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.operation import operation
from sparing.core.threads import intra_op
from sparing.parts.code.dead_zone import TOP, digits, rounded

TINY = 2.0**-32
"""Eigenvalues below this share of the largest are errors of rounding."""
FINER = 254
"""Steps of 8 bits in which a guess reads a matrix are read so much more finely once more."""


class Components(NamedTuple):
    """Strongest first."""

    u: Tensor  # [K, rows, r] float64
    s: Tensor  # [K, r]
    v: Tensor  # [K, columns, r]


def every_component(m: Tensor, rank: int) -> Components:
    """Of matrices `[K, rows, columns]` of few columns, the `rank` strongest."""
    bits = digits(max(m.shape[1:]))
    m = rounded(m.double(), bits)
    turn, square = (z[..., :rank] for z in spectrum(m))
    turn = rounded(turn, bits)
    return Components(divided(m @ turn, square), square.sqrt(), turn)


def strongest_subspace(m: Tensor, start: Tensor, rank: int, passes: int) -> Components:
    """Of matrices `[K, rows, columns]`, from a guess of the right vectors `[K, columns, at least r]`."""
    matrix, bits = in_two_planes(m.double()), digits(max(m.shape[1:]))
    x = in_two_planes(refined(matrix, start.double(), passes)[..., :rank])
    y = rounded(FINER * whole_product(matrix, x.high) + whole_product(matrix, x.low), bits)
    turn, square = (z[..., :rank] for z in spectrum(y))
    turn = rounded(turn, bits)
    step = (matrix.step * x.step)[:, 0]
    size = torch.where(step.isfinite(), square.sqrt() * step, torch.nan)
    return Components(divided(y @ turn, square), size, (FINER * x.high.double() + x.low) * x.step @ turn)


def refined(matrix: "Planes", x: Tensor, passes: int) -> Tensor:
    """Orthonormal `[K, columns, r]`, strongest first, nearer to the right vectors with every pass."""
    turned = Planes(matrix.high.mT, matrix.low.mT, matrix.step)
    bits = digits(x.shape[1])
    for _ in range(passes):
        codes, step = whole_numbers(x)
        codes, other = whole_numbers(whole_product(matrix, codes))
        x = rounded(whole_product(turned, codes) * (step * other), bits)
        turn, square = spectrum(x)
        x = divided(x @ rounded(turn, bits), square)
    return x


class Planes(NamedTuple):
    """Numbers of 15 bits, (FINER high + low) step."""

    high: Tensor  # int8
    low: Tensor
    step: Tensor  # [K, 1, 1]


@operation
def in_two_planes(m: Tensor) -> Planes:
    """Of matrices `[K, rows, columns]` float64, with the largest number of each as the last."""
    peak = m.abs().amax((1, 2), keepdim=True)
    step = torch.where(peak == 0, 1.0, peak * (1 / TOP))
    high = (m / step).round_()
    low = (m / step).sub_(high).mul_(FINER).round_()
    return Planes(high.to(torch.int8), low.to(torch.int8), step * (1 / FINER))


@operation
def whole_numbers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Columns `[K, n, r]` as int8 and the step of each `[K, 1, r]`."""
    peak = x.abs().amax(1, keepdim=True)
    step = torch.where(peak > 0, peak * (1 / TOP), 1.0)
    return (x / step).round_().to(torch.int8), step


@operation
def whole_product(a: Planes, b: Tensor) -> Tensor:
    """`[K, m, n]`, in steps, times int8 `[K, n, r]` -> `[K, m, r]` float64, exact."""
    return (FINER * a.high.double() + a.low) @ b.double()


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
