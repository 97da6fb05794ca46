"""Squares and inner products of many tensors, row by row, in the order of `core.reduce`.

>>> products([Term(torch.tensor([[3.0, 4.0]]), other=torch.tensor([[1.0, 0.0]]))], k=1).flatten()
tensor([25.,  3.,  1.], dtype=torch.float64)
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.gpu import ready
from sparing.core.parcel import cleared
from sparing.core.product import Product, formed
from sparing.core.reduce import total
from sparing.core.tree import abreast

BLOCK = 1 << 22
"""Entries that are looked at at once."""
ALL = slice(None)


class Term(NamedTuple):
    """a = x + shift and b = other, both zero where the mask is false; axis 0 of each is K or 1."""

    x: Tensor
    shift: Tensor | None = None
    other: Tensor | None = None
    mask: Tensor | None = None


def products(terms: list[Term], k: int) -> Tensor:
    """Sums of a a, or of a a, a b and b b where the terms have a b, of K rows of L terms: `[1 or 3, K, L]` float64."""
    planes = 1 if terms[0].other is None else 3
    if ready(terms[0].x):
        return in_kernels(terms, k, planes)
    out = torch.empty(planes, k, len(terms), dtype=torch.float64, device=terms[0].x.device)
    for i, term in enumerate(terms):
        step = max(1, BLOCK // max(math.prod(term.x.shape[1:]), 1))
        for at in (slice(j, min(j + step, k)) for j in range(0, k, step)):
            shift, other, mask = (None if y is None else rows(y, at) for y in term[1:])
            a = rows(term.x, at).expand(at.stop - at.start, *term.x.shape[1:]).double()
            a = cleared(a if shift is None else a + shift.double(), mask)
            out[0, at, i] = total(a * a)
            if other is not None:
                b = cleared(other.double(), mask)
                out[1, at, i], out[2, at, i] = total(a * b), total(b * b)
    return out


def in_kernels(terms: list[Term], k: int, planes: int) -> Tensor:
    """All terms side by side, in one launch, then all of their blocks together."""
    from sparing.core.gpu.sums import block_products

    shapes = [term.x.shape[1:] for term in terms]
    xs, shifts, others, masks = zip(*terms, strict=True)
    x = joined(xs, shapes, 0.0)
    other = x if all(a is b for a, b in zip(xs, others, strict=True)) else joined(others, shapes, 0.0)
    given = [x, joined(shifts, shapes, 0.0), other, joined(masks, shapes, True)]
    sums = block_products(given, k, tuple(map(math.prod, shapes)))
    return total(sums.flatten(0, 2)).view(planes, k, len(terms))


def joined(parts: Sequence[Tensor | None], shapes: list[torch.Size], gap: float) -> Tensor | None:
    """Tensors side by side in a row for each client, or in one for all; `gap` stands for a missing one."""
    some = [rows(x) for x in parts if x is not None]
    if not some:
        return None
    most = max(x.shape[0] for x in some)
    if len(some) < len(parts):
        fill, there = torch.full((1,), gap, dtype=some[0].dtype, device=some[0].device), iter(some)
        some = [fill.view(1, *[1] * len(n)) if x is None else next(there) for x, n in zip(parts, shapes, strict=True)]
    whole = [(most, *shape) for shape in shapes]
    return abreast([x if x.shape == n else x.expand(n) for x, n in zip(some, whole, strict=True)])


def rows(x: Tensor, at: slice = ALL) -> Tensor:
    """Some rows, or the one that all have; a product is formed for this once, since a mean is quicker without."""
    if isinstance(x, Product):
        return formed(Product(x.left[at], x.right[at], None, x.base)) if x.whole is None else x.whole[at]
    return x if x.shape[0] == 1 or at == ALL else x[at]
