"""An update as its strongest components: what matters of its matrices, in few bytes.

Every matrix is a sum of s u v^T, and with one step D for the whole model

    a = codes(s u / D),  b = codes(s v / D),   the receiver takes D a b^T / sqrt(|a| |b|), since |a| ~ s / D ~ |b|

so that all numbers sent are off by about as much, strong components get more bits than weak ones, and no scales
travel. A component is sent where s^2 >= SLOPE (rows + columns) D^2: there it saves more error than its bytes would
elsewhere. D follows from the energy or the bytes that were asked for. Vectors are rounded to the same step.

A convolution is the matrix [filters, channels * kernel] or [filters * height, channels * width], whichever has fewer
rows and columns. A tensor whose codes would pass 127 gets a longer step of its own.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.codec import refuse_part
from sparing.core.errors import MethodError, check_range
from sparing.core.factors import Shape, matrix_of, sides, weight_of
from sparing.core.keys import Ctx
from sparing.core.parcel import Leaf, Parcel, Schema, Spec, cleared
from sparing.core.protocols import Codec, View
from sparing.core.reduce import total
from sparing.core.rounding import codes_of, digits, reaching, rounded
from sparing.core.subspace import Components, strongest
from sparing.core.tree import Layout, Tree, column, flat

SLOPE = 0.25
"""Measured on updates of a CNN and a ResNet-18: anything from 0.15 to 0.35 takes about as many bytes."""
LOST = 0.1
"""The squared error of a rounded number, in squared steps."""
PASSES, MORE = 2, 8
"""Of the subspace iteration: its steps, and the columns it carries beside those asked for."""
FINEST = 0.5
"""In root mean squares of the update."""
HALVINGS = 16
FRAME, SECTION = 40, 10
"""Bytes of a parcel and of each leaf in it beside the codes, about."""
JOIN = "\n"
"""Stands before each name of the vectors that travel as one leaf; no name holds one."""


class Matrix(NamedTuple):
    """How a tensor is seen, and how many components of it may travel."""

    rows: int
    columns: int
    split: bool  # [filters * height, channels * width]
    rank: int


class Wanted(NamedTuple):
    """Components until they hold this share of the squared norm, or take about so many bytes."""

    energy: float = 0.9
    budget: float = math.inf


def components(layout: Layout, wanted: Wanted = Wanted(), rank: int = 32, skip: frozenset[str] = frozenset()) -> Codec:
    """The strongest components, at most `rank` of a matrix; tensors in `skip` never travel."""
    check_range("lowrank.energy", wanted.energy, 0, 1, open_low=True)
    check_range("lowrank.budget", wanted.budget, 1, math.inf)
    check_range("lowrank.rank", rank, 1, math.inf)
    if layout.bases:
        raise MethodError(
            "lowrank looks for matrices, which tensors of a model split into bases do not show; drop "
            "lowrank or split-mix"
        )
    floats = [name for name in layout.floats if name not in skip]
    matrices = {name: how for name in floats if (how := matrix(layout.shapes[name], rank)) is not None}
    if not matrices:
        raise MethodError("lowrank would factor nothing: no matrix of the model is larger than two of its components")

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = {name: leaf for name, leaf in parcel.leaves.items() if name not in floats}
        values = {name: leaf.value.double() for name, leaf in parcel.leaves.items() if name not in leaves}
        if not values:
            return parcel, state
        for name in values:
            refuse_part("lowrank", name, parcel.leaves[name])
        here = {name: how for name, how in matrices.items() if name in values}
        found = {name: decomposed(name, seen(values[name], how), how.rank, view.ctx) for name, how in here.items()}
        rest = {name: flat(x) for name, x in values.items() if name not in here}
        cut = cut_for(wanted, values, found, rest)
        step = (cut / SLOPE).sqrt()
        for name, parts in found.items():
            leaves |= written(name, parts, cut, step)
        if rest:
            joined = torch.cat([*rest.values()], 1)
            own = reaching(step, joined)
            leaves[joint(rest)] = Leaf(codes_of(joined, own), scale=own[:, None], bits=8, tight=True)
        return Parcel(leaves, parcel.notes), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = {}
        for key, leaf in parcel.leaves.items():
            name, factor = key[:-2], key[-2:]
            if key.startswith(JOIN):
                assert leaf.scale is not None
                names = key.split(JOIN)[1:]
                parts = (leaf.value * leaf.scale).split([math.prod(layout.shapes[name]) for name in names], 1)
                for name, x in zip(names, parts, strict=True):
                    leaves[name] = Leaf(x.reshape(len(x), *layout.shapes[name]).to(layout.dtypes[name]))
            elif name not in matrices or factor not in ("/p", "/q"):
                leaves[key] = leaf
            elif factor == "/p":
                value = weight(product(leaf, parcel.leaves[f"{name}/q"]), matrices[name], layout.shapes[name])
                leaves[name] = Leaf(value.to(layout.dtypes[name]))
        return Parcel(leaves, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {name: spec for name, spec in expected.leaves.items() if name not in floats}
        here = [name for name in expected.leaves if name in floats]
        for name, how in matrices.items():
            if name in here:
                mask = ((how.rank, 1),)
                leaves[f"{name}/p"] = Spec((how.rank, how.rows), torch.int8, grains=mask, scales=1, tight=True)
                leaves[f"{name}/q"] = Spec((how.rank, how.columns), torch.int8, grains=mask, tight=True)
        rest = {name: math.prod(layout.shapes[name]) for name in here if name not in matrices}
        if rest:
            leaves[joint(rest)] = Spec((sum(rest.values()),), torch.int8, scales=1, tight=True)
        return expected._replace(leaves=leaves)

    return Codec(encode, decode, schema, name="lowrank", lossy=True, traits=frozenset({"basis", "codes", "whole"}))


def joint(names: Iterable[str]) -> str:
    """What the leaf of all vectors is called."""
    return "".join(JOIN + name for name in names)


def matrix(shape: Shape, rank: int) -> Matrix | None:
    """None for a vector, and for what two components would not make smaller.

    >>> matrix((64, 32, 5, 5), 8), matrix((64, 3, 3, 3), 99)
    (Matrix(rows=320, columns=160, split=True, rank=8), Matrix(rows=64, columns=27, split=False, rank=27))
    """
    if len(shape) < 2:
        return None
    flat_sides = shape[0], math.prod(shape[1:])
    split = len(shape) == 4 and sum(sides(shape)) < sum(flat_sides)
    m, n = sides(shape) if split else flat_sides
    return Matrix(m, n, split, min(rank, m, n)) if 2 * (m + n) < m * n else None


def seen(x: Tensor, how: Matrix) -> Tensor:
    return matrix_of(x) if how.split else x.reshape(len(x), how.rows, how.columns)


def weight(x: Tensor, how: Matrix, shape: Shape) -> Tensor:
    """`seen` undone."""
    return weight_of(x, shape) if how.split else x.reshape(len(x), *shape)


def decomposed(name: str, m: Tensor, rank: int, ctx: Ctx) -> Components:
    """From a keyed guess of the vectors of the smaller side; from all of them where they are few."""
    if m.shape[1] < m.shape[2]:
        turned = decomposed(name, m.mT, rank, ctx)
        return Components(turned.v, turned.s, turned.u)
    n, r = m.shape[2], rank + MORE
    if r < n:
        return strongest(m, ctx.uniform(f"lowrank/{name}", n * r).reshape(-1, n, r) * 2 - 1, rank, PASSES)
    return strongest(m, torch.eye(n, device=m.device).expand(len(m), n, n), rank, 1)


def written(name: str, parts: Components, cut: Tensor, step: Tensor) -> dict[str, Leaf]:
    """A matrix as the codes of the components that pass the cut, `[K, r, rows]` and `[K, r, columns]`."""
    strong = (parts.s.square() / (parts.u.shape[1] + parts.v.shape[1]) >= cut[:, None]) & (parts.s > 0)
    p, q = (cleared((x * parts.s[:, None]).mT, strong[:, :, None]) for x in (parts.u, parts.v))
    own = reaching(step, torch.cat([p, q], 2))
    p, q = codes_of(p, own), codes_of(q, own)
    keep = p.any(2, keepdim=True) & q.any(2, keepdim=True)
    return {
        f"{name}/p": Leaf(cleared(p, keep), keep=(keep,), scale=own[:, None], bits=8, tight=True),
        f"{name}/q": Leaf(cleared(q, keep), keep=(keep,), bits=8, tight=True),
    }


def product(p: Leaf, q: Leaf) -> Tensor:
    """D a b^T / sqrt(|a| |b|) added up, `[K, rows, columns]` float64; the sums are exact."""
    a, b = p.value.double(), q.value.double()
    size = (a.square().sum(2) * b.square().sum(2)).sqrt().sqrt()[:, :, None]
    bits = digits(a.shape[1])
    assert p.scale is not None
    return column(p.scale[:, 0], a) * (rounded(a / torch.where(size > 0, size, 1.0), bits).mT @ b)


# ---------------------------------------------------------------------------------------------------- how much to send


def cut_for(wanted: Wanted, values: Tree, found: dict[str, Components], rest: Tree) -> Tensor:
    """The least s^2 / (rows + columns) of a component that is sent, `[K]`.

    No step is shorter than FINEST, whatever was asked for: what is that weak looks like noise, of any rank.
    """
    whole, calm = (sum((total(x.square()) for x in tree.values()), torch.zeros(())) for tree in (values, rest))
    least = whole * (SLOPE * FINEST**2 / sum(x[0].numel() for x in values.values()))
    if not found:
        return least
    square = torch.cat([x.s for x in found.values()], 1).square()
    side = square.new_tensor([[x.u.shape[1], x.v.shape[1]] for x in found.values() for _ in range(x.s.shape[1])])
    ratio, order = (square / side.sum(1)).sort(dim=1, descending=True, stable=True)
    square, side = square.gather(1, order), side[order]  # [K, C], [K, C, 2]
    held = rounded(square, 40).cumsum(1) - LOST / SLOPE * ratio * side.sum(2).cumsum(1)
    short = held < (wanted.energy * whole - calm)[:, None]
    last = short.sum(1, keepdim=True).clamp(max=square.shape[1] - 1)
    cut = torch.maximum(ratio.gather(1, last)[:, 0], least)
    if wanted.budget == math.inf:
        return cut
    size = sum(x.shape[1] for x in rest.values())

    def spent(cut: Tensor) -> Tensor:
        """Bytes, about."""
        step = (cut / SLOPE)[:, None, None]
        bits = (side * bits_for(square[:, :, None] / (side * step))).sum(2)
        bits = total(cleared(bits, ratio >= cut[:, None])) + size * bits_for(calm / max(size, 1) / step[:, 0, 0])
        return bits / 8 + FRAME + SECTION * (2 * len(found) + 1)

    enough, low, top = spent(cut) <= wanted.budget, cut, torch.maximum(ratio[:, 0], least)
    for _ in range(HALVINGS):
        middle = (low * top).sqrt()
        fits = spent(middle) <= wanted.budget
        low, top = torch.where(fits, low, middle), torch.where(fits, middle, top)
    return torch.where(enough, cut, top)


def bits_for(square: Tensor) -> Tensor:
    """The entropy of a code whose values have this mean square in squared steps, about.

    Half the logarithm of 1 + 14 x, by straight lines between powers of two: the same on every device.
    """
    mantissa, exponent = torch.frexp(1 + 14 * square)
    return exponent / 2 + mantissa - 1
