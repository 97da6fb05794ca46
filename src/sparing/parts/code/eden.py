"""DRIVE and EDEN: rotate at random, then send each coordinate as a few bits.

A random rotation R makes the coordinates of any vector x look normal, so one fixed table of levels fits them all. Here
R = A B / d with A and B each the Hadamard matrix of d rows times random signs: one alone leaves a vector with a few
large entries far from normal. With y = sqrt(d) R x, z = y / |x|_2 is nearly standard normal and q(z) the nearest level;
the receiver takes S sqrt(d) R^T q for x:

    S = |x|^2 / <y, q>            unbiased, and <x, decoded> = |x|^2 always
    S = <y, q> / (d |q|^2)        the least squared error

Where only a part of a tensor is shared, that part is gathered and rotated: others neither travel nor take part. Vectors
are filled up with zeros to a power of two, and so much is sent: the coordinates of x lie in their own places, those
beyond them in places appended to the tensor.
"""

import math

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import WireError, check_range
from sparing.core.keys import hashes
from sparing.core.method import TURNS, Codec, View
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, flat

LEVELS = {
    1: [0.797884561],
    2: [0.452780035, 1.510417608],
    3: [0.245094179, 0.756005281, 1.343909279, 2.151945705],
    4: [0.12839503, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571],
}
"""The positive half of the Lloyd-Max levels of a standard normal variable, by bits: those of least squared error."""


def eden_codec(layout: Layout, bits: int = 1, unbiased: bool = True) -> Codec:
    check_range("eden.bits", bits, 1, 4)
    params = frozenset(layout.floats)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaf = leaves[name]
            scope = _wide_scope(leaf)
            x = _gather_scope(torch.nn.functional.pad(flat(leaf.value.float()), (0, _appended_places(leaf))), scope)
            codes, scale = torch.zeros_like(x, dtype=torch.int8), x.new_zeros(len(x), 1)
            for rows, d in _rows_by_length(x, scope):
                codes[rows, :d], scale[rows] = quantised(x[rows, :d], *_random_signs(name, view.ctx.at(rows), d))
            leaves[name] = leaf._replace(value=_scatter_scope(codes, scope), scope=scope, scale=scale, bits=bits)
        return Parcel(leaves, parcel.notes), state

    def quantised(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Codes of `[K, d]` vectors, and S `[K, 1]`."""
        y = hadamard_rows(hadamard_rows(x * first) * second * x.shape[1] ** -0.5)
        square = total(x.double().square())
        length = square.sqrt().float()[:, None]
        codes = _nearest_level(y / torch.where(length > 0, length, 1.0), bits)
        q = _level_value(codes, bits)
        along, size = total(y.double() * q), total(q.double().square())
        scale = _eden_ratio(square, along) if unbiased else _eden_ratio(along, size * x.shape[1])
        return codes, scale.float()[:, None]

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaf, shape = leaves[name], layout.shapes[name]
            assert leaf.scale is not None
            codes = _gather_scope(leaf.value, leaf.scope)
            x = torch.zeros_like(codes, dtype=torch.float32)
            for rows, d in _rows_by_length(codes, leaf.scope):
                first, second = _random_signs(name, ctx.at(rows), d)
                back = hadamard_rows(hadamard_rows(_level_value(codes[rows, :d], bits)) * second * d**-0.5)
                x[rows, :d] = back * first * leaf.scale[rows]
            n = math.prod(shape)
            value = _scatter_scope(x, leaf.scope)[:, :n].reshape(len(x), *shape).to(layout.dtypes[name])
            scope = None if leaf.scope is None else leaf.scope[:, :n].reshape(-1, *shape)
            leaves[name] = leaf._replace(value=value, scope=scope, scale=None, bits=32)
        return Parcel(leaves, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {}
        for name, spec in expected.leaves.items():
            if name in params:
                shape = (math.prod(spec.shape) + _appended_places(spec),)
                spec = spec._replace(shape=shape, dtype=torch.int8, scope=_wide_scope(spec), scales=1, bits=bits)
            leaves[name] = spec
        return expected._replace(leaves=leaves, limit=None)  # vectors are filled up

    return Codec(encode, decode, schema, name="eden", effect=TURNS)


def _power_of_two(n: int) -> int:
    """The least power of two that is at least n; 0 for nothing."""
    return 1 << (n - 1).bit_length() if n else 0


def _appended_places(part: Leaf | Spec) -> int:
    """Places appended to a tensor: as many as its vector may need beyond its own."""
    n = math.prod(part.value.shape[1:] if isinstance(part, Leaf) else part.shape)
    whole = part.scope is None and not part.told
    return _power_of_two(n) - n if whole else _power_of_two(n) // 2


def _wide_scope(part: Leaf | Spec) -> Tensor | None:
    """The scope over a tensor's own places and those appended: so many of them that a power of two is sent."""
    if part.scope is None:
        if not (isinstance(part, Leaf) and part.told):
            return None  # all of it, or told only when the bytes come
        mask = torch.ones(1, *part.value.shape[1:], dtype=torch.bool, device=part.value.device)
    else:
        mask = part.scope
    shape = part.value.shape[1:] if isinstance(part, Leaf) else part.shape
    inside = flat(mask.expand(-1, *shape))
    short = torch.tensor([_power_of_two(int(n)) - int(n) for n in inside.sum(dim=1)], device=mask.device)
    return torch.cat([inside, torch.arange(_appended_places(part), device=mask.device) < short[:, None]], dim=1)


def _scope_order(scope: Tensor) -> Tensor:
    """Places in scope first, in their order: `[K, n]` -> `[K, n]`."""
    return (~scope).to(torch.uint8).argsort(dim=1, stable=True)


def _gather_scope(x: Tensor, scope: Tensor | None) -> Tensor:
    """What is in scope to the front of every row; the rest is zero already."""
    return x if scope is None else x.gather(1, _scope_order(scope).expand(len(x), -1))


def _scatter_scope(x: Tensor, scope: Tensor | None) -> Tensor:
    """`_gather_scope` undone."""
    return x if scope is None else torch.zeros_like(x).scatter(1, _scope_order(scope).expand(len(x), -1), x)


def _rows_by_length(x: Tensor, scope: Tensor | None) -> list[tuple[Tensor, int]]:
    """Rows whose vectors are equally long, and how long: a power of two each, or nothing."""
    if scope is None:
        size_K = torch.full((len(x),), x.shape[1], device=x.device)
    else:
        size_K = scope.sum(dim=1).expand(len(x))
    sizes = [int(d) for d in size_K.unique() if d > 0]
    for d in sizes:
        if d != _power_of_two(d):
            raise WireError(f"a rotated vector of {d} coordinates; it must be a power of two: send what eden encoded")
    return [((size_K == d).nonzero()[:, 0], d) for d in sizes]


def _random_signs(name: str, ctx: Ctx, d: int) -> tuple[Tensor, Tensor]:
    """-1 or 1, twice `[K, d]`, from two bits of a word: both ends draw the same."""
    words = hashes(ctx.keys(f"eden/{name}"), d)
    return torch.where(words < 0, -1.0, 1.0), torch.where(words << 1 < 0, -1.0, 1.0)


def hadamard_rows(x: Tensor) -> Tensor:
    """H x, `[K, d]`, d a power of two: sums and differences in a fixed order, the same on every device.

    >>> hadamard_rows(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
    tensor([[10., -2., -4.,  0.]])
    """
    k, d = x.shape
    wide = 1 << (d.bit_length() // 2)  # H is that of d / wide rows, of rows of `wide` each: long rows are fast
    tall = _butterflies(x.reshape(k, -1, wide))
    return _butterflies(tall.mT.contiguous()).mT.reshape(k, d)


def _butterflies(x: Tensor) -> Tensor:
    """Hadamard's matrix along the middle axis of `[K, a, b]`."""
    k, a, b = x.shape
    step = 1
    while step < a:
        x, out = x.view(k, -1, 2, step * b), x.new_empty(k, a // (2 * step), 2, step * b)
        torch.add(x[:, :, 0], x[:, :, 1], out=out[:, :, 0])
        torch.sub(x[:, :, 0], x[:, :, 1], out=out[:, :, 1])
        x, step = out.view(k, a, b), 2 * step
    return x


def _nearest_level(z: Tensor, bits: int) -> Tensor:
    """The code of the nearest level: 0, 1, ... from zero upwards, -1, -2, ... downwards; of one bit, 1 and -1."""
    if bits == 1:
        return torch.where(z < 0, -1, 1).to(torch.int8)
    levels = torch.tensor(LEVELS[bits], device=z.device)
    place = torch.bucketize(z.abs(), (levels[1:] + levels[:-1]) / 2)
    return torch.where(z < 0, -1 - place, place).to(torch.int8)


def _level_value(codes: Tensor, bits: int) -> Tensor:
    levels = torch.tensor(LEVELS[bits], device=codes.device)
    codes = codes.long()
    if bits == 1:
        return codes * levels[0]
    size = torch.where(codes < 0, -1 - codes, codes).clamp(max=len(levels) - 1)
    return torch.where(codes < 0, -levels[size], levels[size])


def _eden_ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and a where b is zero: then a is zero too, or not a number."""
    return a / b.masked_fill(b == 0, 1.0)
