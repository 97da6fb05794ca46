"""PowerSGD: a matrix of an update as two thin factors, one step of power iteration from those of the round before.

    P = orthonormal(M Q),  Q = M^T P,  the receiver takes P Q^T for M

A convolution is the matrix [filters, channels * kernel]; vectors pass whole, as does a matrix whose factors would not
be smaller. Q is remembered by the client; a column of it that is zero is drawn anew. All sums have a fixed order.
"""

import math

import torch
from torch import Tensor

from sparing.core.codec import refuse_part
from sparing.core.context import Ctx
from sparing.core.errors import MethodError, check_range
from sparing.core.method import TURNS, Codec, Trait, View
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, prefixed, under

TINY = 1e-9
"""A column that keeps less than this of its length beside the columns before it depends on them, and is left out."""


def powersgd_codec(layout: Layout, rank: int = 2, skip: frozenset[str] = frozenset()) -> Codec:
    """Factors of rank `rank` for every matrix but those in `skip`, which never travel."""
    check_range("powersgd.rank", rank, 1, math.inf)
    if layout.bases:
        raise MethodError(
            "powersgd looks for matrices, which tensors of a model split into bases do not show; drop "
            "powersgd or split-mix"
        )
    sides = {
        name: (shape[0], math.prod(shape[1:]))
        for name, shape in layout.shapes.items()
        if name in layout.params and name not in skip and layout.dtypes[name].is_floating_point and len(shape) > 1
    }
    sides = {name: (m, n) for name, (m, n) in sides.items() if rank * (m + n) < m * n}
    if not sides:
        raise MethodError(
            f"powersgd would factor nothing: no matrix that is shared is larger than two of rank {rank}; drop it"
        )

    def init(_: Layout) -> Tree:
        return prefixed(
            "q", {name: torch.zeros(1, n, rank, dtype=layout.dtypes[name]) for name, (_, n) in sides.items()}
        )

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        old, leaves = under("q", state), {}
        for name, leaf in parcel.leaves.items():
            if name not in sides:
                leaves[name] = leaf
                continue
            refuse_part("powersgd", name, leaf)
            m = leaf.value.reshape(-1, *sides[name]).double()
            p = _orthonormal(_row_exact_product(m, _started_factor(name, old[name], view.ctx)))
            old[name] = _row_exact_product(m.mT, p).to(leaf.value.dtype)
            leaves |= {f"{name}/p": Leaf(p.to(leaf.value.dtype)), f"{name}/q": Leaf(old[name])}
        return Parcel(leaves, parcel.notes), prefixed("q", old)

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = {}
        for name in dict.fromkeys(name.removesuffix("/p").removesuffix("/q") for name in parcel.leaves):
            if name not in sides:
                leaves[name] = parcel.leaves[name]
                continue
            p, q = (parcel.leaves[f"{name}/{x}"].value.double() for x in "pq")
            value = _outer_products(p, q).reshape(-1, *layout.shapes[name])
            leaves[name] = Leaf(value.to(layout.dtypes[name]))
        return Parcel(leaves, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {}
        for name, spec in expected.leaves.items():
            if name in sides:
                m, n = sides[name]
                leaves |= {f"{name}/p": Spec((m, rank), spec.dtype), f"{name}/q": Spec((n, rank), spec.dtype)}
            else:
                leaves[name] = spec
        return expected._replace(leaves=leaves)

    return Codec(encode, decode, schema, init, name="powersgd", effect=TURNS._replace(traits=Trait.WHOLE))


def _started_factor(name: str, q: Tensor, ctx: Ctx) -> Tensor:
    """The factor to go on from, `[K, n, r]`, with fresh numbers for columns that are zero."""
    n, r = q.shape[1:]
    fresh = ctx.uniform(f"powersgd/{name}", n * r).reshape(-1, n, r).double() * 2 - 1
    return torch.where((q == 0).all(dim=1, keepdim=True), fresh, q.double())


def _row_exact_product(m: Tensor, x: Tensor) -> Tensor:
    """M X, `[K, a, b]` and `[K, b, r]` -> `[K, a, r]`."""
    k, a, b = m.shape
    columns = [total((m * y[:, None]).reshape(k * a, b)).reshape(k, a) for y in x.unbind(dim=2)]
    return torch.stack(columns, dim=2)


def _outer_products(p: Tensor, q: Tensor) -> Tensor:
    """P Q^T, `[K, a, r]` and `[K, b, r]` -> `[K, a, b]`, term by term."""
    out = p.new_zeros(p.shape[0], p.shape[1], q.shape[1])
    for x, y in zip(p.unbind(dim=2), q.unbind(dim=2), strict=True):
        out = out + x[:, :, None] * y[:, None]
    return out


def _orthonormal(p: Tensor) -> Tensor:
    """Gram-Schmidt over the columns, twice over, since once is not enough for columns that nearly agree."""
    done: list[Tensor] = []
    for x in p.unbind(dim=2):
        before = _column_length(x)
        for y in done + done:
            x = x - total(x * y)[:, None] * y
        size = _column_length(x)
        gone = size <= TINY * before
        done.append(torch.where(gone, 0.0, x / torch.where(gone, 1.0, size)))
    return torch.stack(done, dim=2)


def _column_length(x: Tensor) -> Tensor:
    return total(x.square()).sqrt()[:, None]
