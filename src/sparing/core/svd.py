"""Truncated singular value decompositions of many matrices at once, going on from earlier ones.

A decomposition from nothing is exact: eigenvectors of the smaller Gram matrix, in float64. One that goes on from the
right vectors of a matrix that has since moved a little takes a step of subspace iteration and looks at what its
singular vectors miss of the matrix; where that is too much it takes another, and in the end the exact one. All of it
runs on one thread, so that its bits do not depend on how many there are. A GPU has its host find the eigenvectors of
small matrices, which takes the host less time; where all are small, both go on with other work meanwhile (`Soon`).

    >>> m = torch.diag(torch.tensor([3.0, 2.0, 1.0]))[None]
    >>> exact(m, 2).s
    tensor([[3., 2.]])
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.factors import squared
from sparing.core.gpu import fetched
from sparing.core.threads import aside, intra_op

PROBES = 8
"""Random columns that join a warm start: what is new and orthogonal to all that was known would never be seen else."""
STEPS = 3
TOLERANCE = 0.015
"""The squared residual of the singular vectors may be so much of the squared error; the error itself was then measured
to lie within 3 % of the best (benchmarks/decompose.py)."""
FLOOR = 1e-6
"""And so much of the whole matrix: more than float32 rounding leaves."""
HOST = 192
"""The longest side of a matrix that a GPU hands to its host."""
TINY = 1e-7
"""Singular values below this share of the largest are zero."""


class Svd(NamedTuple):
    """The r largest singular values of each matrix and their vectors."""

    u: Tensor  # [L, rows, r]
    s: Tensor  # [L, r], falling
    v: Tensor  # [L, columns, r]


class Strength(NamedTuple):
    """How large matrices are, and in which directions; float64 on the CPU."""

    energy: Tensor  # [L]
    s: Tensor  # [L, r]


class Soon(NamedTuple):
    """Decompositions of several stacks of matrices, which may be under way: whoever calls these waits."""

    strengths: Callable[[], list[Strength]]
    svds: Callable[[], list[Svd]]


def anew(m: Tensor, rank: int) -> bool:
    """Whether that costs less than going on: the rank comes near the size of the matrix, or the host does it."""
    side = min(m.shape[1:])
    return 2 * (rank + PROBES) > side or handed(m)


def handed(m: Tensor) -> bool:
    """Whether its device hands it to the host."""
    return m.is_cuda and min(m.shape[1:]) <= HOST


def decomposed(m: Tensor, rank: int, old: Tensor, probes: Callable[[], Tensor]) -> tuple[Svd, int]:
    """Of matrices `[L, rows, columns]`, and how many of them could not go on from `old`, their right vectors before."""
    with intra_op(1):
        if anew(m, rank):
            return exact(m, rank), 0
        found, good = warm(m, old, probes())
        bad = (~good).nonzero()[:, 0]
        if len(bad):
            again = exact(m[bad], rank)
            for x, y in zip(found, again, strict=True):
                x[bad] = y
        return found, len(bad)


def exact(m: Tensor, rank: int) -> Svd:
    return exact_each([m], [rank])[0]


def exact_each(matrices: list[Tensor], ranks: list[int]) -> list[Svd]:
    """Of matrices `[L, rows, columns]` of several shapes."""
    with intra_op(1):
        tall = [upright(m) for m in matrices]
        right = strongest([squared(x.mT) for x in tall], ranks)
        return [finished(m, x, v) for m, x, v in zip(matrices, tall, right, strict=True)]


def exact_soon(matrices: list[Tensor], ranks: list[int]) -> Soon:
    """The same of small matrices, while the device and this thread of its host go on."""
    tall = [upright(m) for m in matrices]
    shapes = [(len(x), x.shape[2], x.shape[2]) for x in tall]
    coming = fetched(torch.cat([squared(x.mT).flatten() for x in tall]))

    def solved() -> list[tuple[Strength, list[Tensor]]]:
        parts = coming().split([math.prod(shape) for shape in shapes])
        with torch.no_grad(), intra_op(1):
            return [resolved(part.view(shape), rank) for part, shape, rank in zip(parts, shapes, ranks, strict=True)]

    found = aside(solved)

    def svds() -> list[Svd]:
        there = iter(moved([x for _, thin in found() for x in thin], matrices[0].device))
        return [sided(m, x @ over, s, v) for m, x, s, v, over in zip(matrices, tall, there, there, there, strict=True)]

    return Soon(lambda: [strength for strength, _ in found()], svds)


def resolved(gram: Tensor, rank: int) -> tuple[Strength, list[Tensor]]:
    """Of x^T x: how strong x is; its singular values s, its right vectors v, and v / s, of which x makes the left.

    Mostly in NumPy: every operation of torch lets another thread take its turn, and there are many small ones.
    """
    squares, vectors = (x.numpy()[..., ::-1] for x in torch.linalg.eigh(gram))
    squares, v = squares.clip(min=0), vectors[:, :, :rank]
    s = np.sqrt(squares[:, :rank])
    s[s <= TINY * s[:, :1]] = 0.0
    over = v / np.where(s == 0, np.inf, s)[:, None]
    strength = Strength(torch.from_numpy(squares.sum(1)), torch.from_numpy(s))
    return strength, [strength.s, torch.from_numpy(v.copy()), torch.from_numpy(over)]


def known(matrices: list[Tensor], found: list[Svd]) -> Soon:
    """Those that are there already; how strong they are is on its way to the host."""
    told = [x for m, one in zip(matrices, found, strict=True) for x in (energy(m), one.s.double())]
    shapes = [x.shape for x in told]
    coming = fetched(torch.cat([x.flatten() for x in told]) if told else torch.zeros(0))

    def strengths() -> list[Strength]:
        parts = coming().split([shape.numel() for shape in shapes])
        there = iter(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        return [Strength(size, s) for size, s in zip(there, there, strict=True)]

    return Soon(strengths, lambda: found)


def upright(m: Tensor) -> Tensor:
    """The matrices, or their transposes where they are wide, in float64."""
    return (m.mT if m.shape[1] < m.shape[2] else m).double()


def finished(m: Tensor, x: Tensor, v: Tensor) -> Svd:
    """From the right vectors v of x, which is m or, where m is wide, its transpose."""
    u = x @ v
    s = torch.linalg.vector_norm(u, dim=1)
    none = s <= TINY * s[:, :1]
    u, s = u / s.masked_fill(none, torch.inf)[:, None], s.masked_fill(none, 0.0)
    return sided(m, u, s, v)


def sided(m: Tensor, u: Tensor, s: Tensor, v: Tensor) -> Svd:
    u, v = (v, u) if m.shape[1] < m.shape[2] else (u, v)
    return Svd(u.to(m.dtype), s.to(m.dtype), v.to(m.dtype))


def strongest(grams: list[Tensor], ranks: list[int]) -> list[Tensor]:
    """Eigenvectors of the largest eigenvalues, falling; those for the host go there and come back together."""
    small = [i for i, gram in enumerate(grams) if gram.shape[1] <= HOST]
    near = dict(zip(small, moved([grams[i] for i in small], torch.device("cpu")), strict=True))
    found = [
        torch.linalg.eigh(near.get(i, gram)).eigenvectors.flip(2)[:, :, :rank]
        for i, (gram, rank) in enumerate(zip(grams, ranks, strict=True))
    ]
    for i, v in zip(small, moved([found[i] for i in small], grams[0].device) if small else (), strict=True):
        found[i] = v
    return found


def moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """All of them to another device in one copy, for which a host does not wait."""
    if not tensors or tensors[0].device == device:
        return tensors
    flat = torch.cat([x.reshape(-1) for x in tensors])
    flat = flat.to(device) if device.type == "cpu" else flat.pin_memory().to(device, non_blocking=True)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def warm(m: Tensor, old: Tensor, probes: Tensor) -> tuple[Svd, Tensor]:
    """Subspace iteration from `old` `[L, columns, r]` and a few columns more; also bool `[L]`: was it enough?

    A step is M^T M - shift: half of the smallest singular value kept, squared, taken away from all, sets the kept ones
    further apart from the rest.
    """
    rank, whole, v, step = old.shape[2], energy(m), old, 0
    while True:
        block = torch.cat([v, probes], dim=2)
        ahead = m @ block
        shift = ahead[:, :, :rank].square().sum(1).amin(1) / 2
        basis = torch.linalg.qr(m.mT @ ahead - shift[:, None, None] * block).Q
        q, r = torch.linalg.qr(m @ basis)
        x, s, yt = torch.linalg.svd(r)
        u, s, v = q @ x[:, :, :rank], s[:, :rank], basis @ yt.mT[:, :, :rank]
        step, missed = step + 1, whole - energy(s[:, None])
        good = residual(m, u, s, v, probes) <= TOLERANCE * missed + FLOOR * whole
        if bool(good.all()) or step == STEPS:
            return Svd(u, s, v), good


def residual(m: Tensor, u: Tensor, s: Tensor, v: Tensor, probes: Tensor) -> Tensor:
    """|M^T U - V S|^2 `[L]`, zero for true singular vectors; estimated from a few random mixtures of the columns."""
    mix = probes[:, : s.shape[1]]
    apart = m.mT @ (u @ mix) - v @ (s[:, :, None] * mix)
    return energy(apart) * s.shape[1] / energy(mix)


def energy(m: Tensor) -> Tensor:
    """Squared Frobenius norms `[L]` in float64."""
    return torch.linalg.vector_norm(m, dim=2).double().square().sum(1)
