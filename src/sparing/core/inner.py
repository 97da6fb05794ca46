"""Squares and inner products of many tensors, row by row, in the order of `core.reduce`.

>>> products([Term(torch.tensor([[3.0, 4.0]]), other=torch.tensor([[1.0, 0.0]]))], k=1).flatten()
tensor([25.,  3.,  1.], dtype=torch.float64)
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.gpu import ready
from sparing.core.parcel import cleared
from sparing.core.product import Product, formed
from sparing.core.reduce import cut_of, total
from sparing.core.tree import flat

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
    """One launch a term, then all of their blocks together."""
    from sparing.core.gpu.sums import block_products

    cuts = [cut_of(max(math.prod(term.x.shape[1:]), 1)) for term in terms]
    most = max(cut.blocks for cut in cuts)
    sums = torch.zeros(planes, k, len(terms), most, dtype=torch.float64, device=terms[0].x.device)
    for term, cut, out in zip(terms, cuts, sums.unbind(2), strict=True):
        x, shift, other = (None if y is None else flat(rows(y)) for y in term[:3])
        mask = None if term.mask is None else flat(term.mask.expand(-1, *term.x.shape[1:]))
        if math.prod(term.x.shape):
            block_products([x, shift, other, mask], k, cut, out)
    return total(sums.view(-1, most)).view(planes, k, len(terms))


def rows(x: Tensor, at: slice = ALL) -> Tensor:
    """Some rows, or the one that all have; a product is formed for this once, since a mean is quicker without."""
    if isinstance(x, Product):
        return formed(Product(x.left[at], x.right[at])) if x.whole is None else x.whole[at]
    return x if x.shape[0] == 1 or at == ALL else x[at]
