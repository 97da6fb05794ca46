"""Sums of products of thin matrices, cut to their strongest directions; the products are not formed.

Of M = sum_i B_i A_i the factors stand side by side: B (m, R) and A (R, n). Their thin QR decompositions leave a core of
R x R, whose singular value decomposition is that of M. Where R reaches the smaller side of M, M itself is formed, once.
All in float64, on the CPU, on one thread, in the order given, the sign of each direction fixed by its largest entry, so
the result depends on nothing else.

    >>> b, a = torch.tensor([[2.0], [0.0]]), torch.tensor([[0.0, 3.0, 0.0]])
    >>> strongest_directions([(b, a), (b, a)]).s[:1]
    tensor([12.], dtype=torch.float64)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.threads import intra_op

TINY = 1e-6
"""Directions with singular values up to this share of the largest are none."""
Pair = tuple[Tensor, Tensor]
"""B `[m, r]` and A `[r, n]`."""


class Directions(NamedTuple):
    """Singular vectors and values of a matrix, falling."""

    u: Tensor  # [m, R]
    s: Tensor  # [R]
    vt: Tensor  # [R, n]


def strongest_directions(pairs: Sequence[Pair]) -> Directions:
    """Of the sum of these products."""
    with intra_op(1):
        thin = [(b.double(), a.double()) for b, a in pairs]
        m, n, rank = len(thin[0][0]), thin[0][1].shape[1], sum(b.shape[1] for b, _ in thin)
        if rank < min(m, n):
            left, b = torch.linalg.qr(torch.cat([b for b, _ in thin], 1))
            right, a = torch.linalg.qr(torch.cat([a for _, a in thin]).mT)
            u, s, vt = torch.linalg.svd(b @ a.mT)
            u, vt = left @ u, vt @ right.mT
        else:
            whole = torch.zeros(m, n, dtype=torch.float64)
            for b, a in thin:
                whole += b @ a
            u, s, vt = torch.linalg.svd(whole, full_matrices=False)
    if not s.numel():
        return Directions(u, s, vt)
    sign = u.gather(0, u.abs().argmax(0, keepdim=True)).sign()
    sign = torch.where(sign == 0, 1.0, sign)
    return Directions(u * sign, s, vt * sign.mT)


def factors_cut(found: Directions, keep: int, scale: float, rows: Tensor) -> tuple[Pair, float]:
    """B and A of the `keep` strongest directions, with scale * B A their sum and |B| = |A|, and what was cut, relative.

    `rows` `[width, n]` gives the width; a direction that is none has a zero column of B and its row, and can learn.
    """
    alive = int((found.s[:keep] > TINY * found.s[0]).sum()) if found.s.numel() else 0
    alive = min(alive, len(rows))
    root = (found.s[:alive] / scale).sqrt()
    b, a = torch.zeros(len(found.u), len(rows), dtype=torch.float64), rows.double().clone()
    b[:, :alive], a[:alive] = found.u[:, :alive] * root, root[:, None] * found.vt[:alive]
    energy = found.s.square()
    whole = float(energy.sum())
    return (b, a), (float(energy[alive:].sum()) / whole) ** 0.5 if whole else 0.0
