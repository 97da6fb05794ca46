"""FedHM's decompositions and products on a GPU.

Its host finds the eigenvectors of small matrices, which takes the host less time; where all are small, both go on with
other work meanwhile.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.accel.awaited import Awaited
from sparing.accel.cuda import takes_kernels
from sparing.core.context import Ctx
from sparing.core.method import Remembered, Report
from sparing.core.ops import to_host
from sparing.core.threads import intra_op, run_aside
from sparing.core.tree import Tree
from sparing.parts import factors
from sparing.parts.factors import gram_of_rows as gram
from sparing.parts.size.fedhm import low_rank, svd
from sparing.parts.size.fedhm.low_rank import LowRank
from sparing.parts.size.fedhm.svd import TINY, Svd, sided, upright

HOST = 192
"""The longest side of a matrix that a GPU hands to its host."""
LONG, PARTS = 4096, 16
"""Rows of so many numbers are cut into so many parts on a GPU: few sums come of them, and most of it would idle."""


def fast_factor_product(a_K: Tensor, b_K: Tensor) -> Tensor:
    """`factors.factor_product`, in a kernel of ours, which does not depend on who is in the batch."""
    if not takes_kernels(a_K) or a_K.dtype != torch.float32:
        return factors.factor_product.plain(a_K, b_K)
    from sparing.accel.cuda.factors import factor_products

    return factor_products(a_K, b_K)


def fast_gram_of_rows(rows: Tensor) -> Tensor:
    """`factors.gram_of_rows`."""
    parts = math.gcd(rows.shape[-1], PARTS) if rows.is_cuda and rows.shape[-1] >= LONG else 1
    if parts == 1:
        return rows @ rows.mT
    cut = rows.unflatten(-1, (parts, -1)).movedim(-2, -3).contiguous()
    return (cut @ cut.mT).sum(-3)


def fast_begins_anew(m: Tensor, rank: int) -> bool:
    """`svd.begins_anew`, or the host does it."""
    return _handed(m) or svd.begins_anew.plain(m, rank)


def _handed(m: Tensor) -> bool:
    """Whether its device hands it to the host."""
    return m.is_cuda and min(m.shape[1:]) <= HOST


def fast_decompose_weights(plan: LowRank, model: Tree, old: Remembered, ctx: Ctx | None) -> tuple[Remembered, Report]:
    """`low_rank.decompose`: where all matrices are small, they are decomposed while the device goes on."""
    matrices = low_rank.matrices_of(plan, model)
    if not matrices or not all(map(_handed, matrices)):
        return low_rank.decompose_weights.plain(plan, model, old, ctx)
    soon = _exact_soon(matrices, [rank for *_, rank in plan.groups])
    state = Awaited(lambda: low_rank.factors_from(plan, soon.svds()))
    return state, Awaited(lambda: {**low_rank.factor_quality(plan, soon.strengths()), "fallbacks": 0.0})


class Soon(NamedTuple):
    """Decompositions of several stacks of matrices, which may be under way: whoever calls these waits."""

    strengths: Callable[[], list[tuple[Tensor, Tensor]]]  # energies [L] and singular values [L, r], on the host
    svds: Callable[[], list[Svd]]


def _exact_soon(matrices: list[Tensor], ranks: list[int]) -> Soon:
    """The same of small matrices, while the device and this thread of its host go on."""
    tall = [upright(m) for m in matrices]
    shapes = [(len(x), x.shape[2], x.shape[2]) for x in tall]
    coming = to_host([torch.cat([gram(x.mT).flatten() for x in tall])])

    def solved() -> list[tuple[tuple[Tensor, Tensor], list[Tensor]]]:
        parts = coming()[0].split([math.prod(shape) for shape in shapes])
        with torch.no_grad(), intra_op(1):
            return [_resolved(part.view(shape), rank) for part, shape, rank in zip(parts, shapes, ranks, strict=True)]

    found = run_aside(solved)

    def svds() -> list[Svd]:
        there = iter(_moved([x for _, thin in found() for x in thin], matrices[0].device))
        return [sided(m, x @ over, s, v) for m, x, s, v, over in zip(matrices, tall, there, there, there, strict=True)]

    return Soon(lambda: [strength for strength, _ in found()], svds)


def _resolved(gram: Tensor, rank: int) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """Of x^T x: how strong x is; its singular values s, its right vectors v, and v / s, of which x makes the left.

    Mostly in NumPy: every operation of torch lets another thread take its turn, and there are many small ones.
    """
    squares, vectors = (x.numpy()[..., ::-1] for x in torch.linalg.eigh(gram))
    squares, v = squares.clip(min=0), vectors[:, :, :rank]
    s = np.sqrt(squares[:, :rank])
    s[s <= TINY * s[:, :1]] = 0.0
    over = v / np.where(s == 0, np.inf, s)[:, None]
    values = torch.from_numpy(s)
    return (torch.from_numpy(squares.sum(1)), values), [values, torch.from_numpy(v.copy()), torch.from_numpy(over)]


def fast_strongest_eigenvectors(grams: list[Tensor], ranks: list[int]) -> list[Tensor]:
    """`svd.strongest_eigenvectors`; those for the host go there and come back together."""
    if not grams or not grams[0].is_cuda:
        return svd.strongest_eigenvectors.plain(grams, ranks)
    small = [i for i, gram in enumerate(grams) if gram.shape[1] <= HOST]
    near = dict(zip(small, _moved([grams[i] for i in small], torch.device("cpu")), strict=True))
    found = [
        torch.linalg.eigh(near.get(i, gram)).eigenvectors.flip(2)[:, :, :rank]
        for i, (gram, rank) in enumerate(zip(grams, ranks, strict=True))
    ]
    for i, v in zip(small, _moved([found[i] for i in small], grams[0].device) if small else (), strict=True):
        found[i] = v
    return found


def _moved(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """All of them to another device in one copy, for which a host does not wait."""
    if not tensors or tensors[0].device == device:
        return tensors
    flat = torch.cat([x.reshape(-1) for x in tensors])
    flat = flat.to(device) if device.type == "cpu" else flat.pin_memory().to(device, non_blocking=True)
    parts = flat.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
