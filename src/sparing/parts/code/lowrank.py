"""An update as its strongest components: what matters of its matrices, in few bytes.

The codes of components (`budget.matrices`), with one step D for the whole model, which follows from the energy that
was asked for. Vectors are rounded to the same step. A tensor whose codes would pass 127 gets a longer step of its own.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.codec import refuse_part
from sparing.core.context import Ctx
from sparing.core.errors import MethodError, check_range
from sparing.core.method import TURNS, Codec, Trait, View
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, flat
from sparing.parts.code.budget.matrices import (
    JOIN,
    SLOPE,
    Matrix,
    add_components,
    as_matrix_shape,
    components_by_root,
    factor_codes,
    joint_name,
    strongest_components,
    weight_as_matrix,
    worthy_components,
)
from sparing.parts.code.budget.subspace import Components
from sparing.parts.code.dead_zone import codes_of, reaching, rounded

LOST = 0.1
"""The squared error of a rounded number, in squared steps."""
FINEST = 0.5
"""In root mean squares of the update."""


class ComponentPlan(NamedTuple):
    """Which tensors travel by their components, and as which matrices."""

    layout: Layout
    floats: list[str]
    matrices: dict[str, Matrix]


def components_codec(layout: Layout, energy: float = 0.9, rank: int = 32, skip: frozenset[str] = frozenset()) -> Codec:
    """The strongest components, at most `rank` of a matrix; tensors in `skip` never travel."""
    check_range("lowrank.energy", energy, 0, 1, open_low=True)
    check_range("lowrank.rank", rank, 1, math.inf)
    if layout.bases:
        raise MethodError(
            "lowrank looks for matrices, which tensors of a model split into bases do not show; drop "
            "lowrank or split-mix"
        )
    floats = [name for name in layout.floats if name not in skip]
    matrices = {name: how for name in floats if (how := as_matrix_shape(layout.shapes[name], rank)) is not None}
    if not matrices:
        raise MethodError(
            "lowrank would factor nothing: no matrix that is shared is larger than two of its components; drop it"
        )

    plan = ComponentPlan(layout, floats, matrices)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = {name: leaf for name, leaf in parcel.leaves.items() if name not in floats}
        values = {name: leaf.value.double() for name, leaf in parcel.leaves.items() if name not in leaves}
        if not values:
            return parcel, state
        for name in values:
            refuse_part("lowrank", name, parcel.leaves[name])
        here = {name: how for name, how in matrices.items() if name in values}
        found = {
            name: strongest_components(name, weight_as_matrix(values[name], how), how.rank, view.ctx)
            for name, how in here.items()
        }
        rest = {name: flat(x) for name, x in values.items() if name not in here}
        cut = _energy_cut(energy, values, found, rest)
        step = (cut / SLOPE).sqrt()
        for name, parts in found.items():
            leaves |= _written_components(name, parts, cut, step)
        if rest:
            joined = torch.cat([*rest.values()], 1)
            own = reaching(step, joined)
            leaves[joint_name(rest)] = Leaf(codes_of(joined, own), scale=own[:, None], bits=8, tight=True)
        return Parcel(leaves, parcel.notes), state

    decode, schema = partial(decode_components, plan), partial(expect_components, plan)
    return Codec(encode, decode, schema, name="lowrank", effect=TURNS._replace(traits=Trait.WHOLE))


def decode_components(plan: ComponentPlan, parcel: Parcel, ctx: Ctx) -> Parcel:
    leaves = {}
    for key, leaf in parcel.leaves.items():
        name, factor = key[:-2], key[-2:]
        if key.startswith(JOIN):
            assert leaf.scale is not None
            names = key.split(JOIN)[1:]
            parts = (leaf.value * leaf.scale).split([math.prod(plan.layout.shapes[name]) for name in names], 1)
            for name, x in zip(names, parts, strict=True):
                leaves[name] = Leaf(x.reshape(len(x), *plan.layout.shapes[name]).to(plan.layout.dtypes[name]))
        elif name not in plan.matrices or factor not in ("/p", "/q"):
            leaves[key] = leaf
        elif factor == "/p":
            assert leaf.scale is not None
            value = leaf.value.new_zeros(len(leaf.value), *plan.layout.shapes[name], dtype=plan.layout.dtypes[name])
            add_components(value, leaf.value, parcel.leaves[f"{name}/q"].value, leaf.scale[:, 0], plan.matrices[name])
            leaves[name] = Leaf(value)
    return Parcel(leaves, parcel.notes)


def expect_components(plan: ComponentPlan, expected: Schema, ctx: Ctx) -> Schema:
    leaves = {name: spec for name, spec in expected.leaves.items() if name not in plan.floats}
    here = [name for name in expected.leaves if name in plan.floats]
    for name, how in plan.matrices.items():
        if name in here:
            mask = ((how.rank, 1),)
            leaves[f"{name}/p"] = Spec((how.rank, how.rows), torch.int8, grains=mask, scales=1, tight=True)
            leaves[f"{name}/q"] = Spec((how.rank, how.columns), torch.int8, grains=mask, tight=True)
    rest = {name: math.prod(plan.layout.shapes[name]) for name in here if name not in plan.matrices}
    if rest:
        leaves[joint_name(rest)] = Spec((sum(rest.values()),), torch.int8, scales=1, tight=True)
    return expected._replace(leaves=leaves)


def _written_components(name: str, parts: Components, cut: Tensor, step: Tensor) -> dict[str, Leaf]:
    """A matrix as the codes of the components that pass the cut, `[K, r, rows]` and `[K, r, columns]`."""
    p, q = components_by_root(parts, worthy_components(parts, cut))
    own = reaching(step, torch.cat([p, q], 2))
    p, q, keep = factor_codes(p, q, own)
    return {
        f"{name}/p": Leaf(p, keep=(keep,), scale=own[:, None], bits=8, tight=True),
        f"{name}/q": Leaf(q, keep=(keep,), bits=8, tight=True),
    }


def _energy_cut(energy: float, values: Tree, found: dict[str, Components], rest: Tree) -> Tensor:
    """The least s^2 / (rows + columns) of a component that is sent, `[K]`.

    No step is shorter than FINEST, whatever was asked for: what is that weak looks like noise, of any rank.
    """
    whole, calm = (sum((total(x.square()) for x in tree.values()), torch.zeros(())) for tree in (values, rest))
    least = whole * (SLOPE * FINEST**2 / sum(x[0].numel() for x in values.values()))
    if not found:
        return least
    square = torch.cat([x.s for x in found.values()], 1).square()
    sides = square.new_tensor([x.u.shape[1] + x.v.shape[1] for x in found.values() for _ in range(x.s.shape[1])])
    ratio, order = (square / sides).sort(dim=1, descending=True, stable=True)
    square, sides = square.gather(1, order), sides[order]
    held = rounded(square, 40).cumsum(1) - LOST / SLOPE * ratio * sides.cumsum(1)
    short = held < (energy * whole - calm)[:, None]
    last = short.sum(1, keepdim=True).clamp(max=square.shape[1] - 1)
    return torch.maximum(ratio.gather(1, last)[:, 0], least)
