"""A byte budget, spent where it buys most: a client's parcel takes at most so many bytes, and most of them.

What of the update travels and how finely is judged at one price for the whole model (`rate_distortion`), then the
parcel is really written, its bytes are counted, and the price is changed until they fit (`byte_search`).

A receiver learns what was chosen from what is there: components that are not sent are not kept, values that are not
sent are zeros, and either costs a few bytes. One leaf tells the step D, and by how many notches, eighths of an octave,
the steps of every tensor's components and values are longer. Vectors travel in one leaf; of a part of a tensor only
values.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import TURNS, Codec, Trait, View
from sparing.core.operation import operation
from sparing.core.parcel import Leaf, Parcel, Schema, Spec, parcel_row, sent_mask
from sparing.core.threads import intra_op
from sparing.core.tree import Layout, Tree, flat
from sparing.parts.code.budget.byte_search import fitted
from sparing.parts.code.budget.matrices import (
    JOIN,
    Matrix,
    add_components,
    as_matrix_shape,
    component_product,
    components_by_root,
    factor_codes,
    joint_name,
    matrix_as_weight,
    strongest_components,
    weight_as_matrix,
)
from sparing.parts.code.budget.rate_distortion import NOTCHES, NOTHING, Choice, judged, largest_value, notch, piece
from sparing.parts.code.budget.subspace import Components
from sparing.parts.code.dead_zone import codes_of, values_of_codes
from sparing.wire import nbytes

By = Literal["best", "values", "components"]
RANK = 32
STEPS = JOIN
"""The name of the leaf that tells the steps."""
NOTES = {"n": torch.zeros(1), "loss": torch.zeros(1)}


class Item(NamedTuple):
    """What is chosen together, of one client: a tensor, or all vectors in one."""

    leaf: Leaf
    x: Tensor  # [1, ...] float64, a matrix as such
    how: Matrix | None  # None: only values may travel


class BudgetPlan(NamedTuple):
    """What of a model may travel, and as what."""

    layout: Layout
    shapes: dict[str, tuple[int, ...]]  # of the tensors that may be chosen from
    matrices: dict[str, Matrix]  # those whose components may travel
    by: By
    least: int = 0  # bytes that say nothing yet: header, notes and buffers
    most: float = math.inf  # bytes that may be sent

    @property
    def factors(self) -> set[str]:
        return {f"{name}/{side}" for name in self.matrices for side in "pq"}


def budget_codec(layout: Layout, most: float = math.inf, by: By = "best", skip: frozenset[str] = frozenset()) -> Codec:
    """At most so many bytes, and what the round leaves time for; tensors in `skip` never travel."""
    plan = _budget_plan(layout, by, skip)._replace(most=most)
    if most <= plan.least:
        raise ConfigError(
            f"budget.bytes is {most:g}, but {plan.least} bytes say nothing yet: header, notes and buffers; give more"
        )

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        if not parcel.leaves.keys() & plan.shapes.keys():
            return parcel, state
        rooms, parts = _rooms_of(most, view.ctx), components_of(plan, parcel, view.ctx)

        def send(k: int, parcel: Parcel, parts: dict[str, Components]) -> Parcel:
            return send_within(plan, parcel, rooms[k], parts)

        return sent_by_each(send, parcel, parts, len(rooms)), state

    traits = Trait.COUNTS | Trait.DEADLINE if most == math.inf else Trait.COUNTS
    decode, schema = partial(decode_chosen, plan), partial(expect_chosen, plan)
    return Codec(encode, decode, schema, name="budget", effect=TURNS._replace(traits=traits))


def _budget_plan(layout: Layout, by: By, skip: frozenset[str]) -> BudgetPlan:
    if by not in get_args(By):
        raise ConfigError(f"budget.by is {by!r}; use best, values or components")
    shapes = {name: layout.shapes[name] for name in layout.floats if name not in skip}
    if not shapes:
        raise MethodError("budget has nothing to send: every layer stays with the client; drop it")
    large = (
        {} if layout.bases else {name: how for name, shape in shapes.items() if (how := as_matrix_shape(shape, RANK))}
    )
    matrices = {n: how for n, how in large.items() if not {f"{n}/p", f"{n}/q"} & layout.shapes.keys()}
    if by == "components" and not matrices:
        raise MethodError("budget by components would factor nothing: no matrix of the model is large; drop by")
    plan = BudgetPlan(layout, shapes, matrices, by)
    zeros = {
        name: Leaf(torch.zeros(1, dtype=layout.dtypes[name]).expand(1, *shape))
        for name, shape in layout.shapes.items()
        if name not in skip
    }
    nothing = send_within(plan, Parcel(zeros, NOTES), 0, {})
    return plan._replace(least=int(nbytes(nothing)[0]))


def split_leaves(plan: BudgetPlan, leaves: Mapping[str, Leaf | Spec]) -> tuple[dict[str, Matrix | None], list[str]]:
    """Tensors with leaves of their own, and as which matrix; and those that share one leaf."""
    alone, joined = {}, []
    for name in (name for name in leaves if name in plan.shapes):
        part = leaves[name].scope is not None or leaves[name].told
        if part or name in plan.matrices:
            alone[name] = None if part or plan.by == "values" else plan.matrices[name]
        else:
            joined.append(name)
    return alone, joined


Send = Callable[[int, Parcel, dict[str, Components]], Parcel]
"""What a client sends of its parcel, of which these are the components."""


@operation
def sent_by_each(send: Send, parcel: Parcel, parts: dict[str, Components], clients: int) -> Parcel:
    """What these clients send."""
    rows = [send(k, parcel_row(parcel, k), components_row(parts, k)) for k in range(clients)]
    return stacked_rows(parcel, rows)


def components_of(plan: BudgetPlan, parcel: Parcel, ctx: Ctx) -> dict[str, Components]:
    """The strongest components of these K clients' matrices that may travel."""
    alone, _ = split_leaves(plan, parcel.leaves)
    matrices = {name: how for name, how in alone.items() if how}
    return {
        name: strongest_components(name, weight_as_matrix(parcel.leaves[name].value.double(), how), how.rank, ctx)
        for name, how in matrices.items()
    }


def components_row(parts: dict[str, Components], k: int) -> dict[str, Components]:
    return {name: Components(*(x[k : k + 1] for x in some)) for name, some in parts.items()}


def send_within(plan: BudgetPlan, parcel: Parcel, room: float, parts: dict[str, Components]) -> Parcel:
    """What a client sends (K = 1), of which these are the components."""
    items = items_of(plan, parcel)
    fixed = Parcel({name: leaf for name, leaf in parcel.leaves.items() if name not in plan.shapes}, parcel.notes)
    largest = largest_value(*(item.x for item in items.values()))
    if not 0 < largest < math.inf or room <= 0:
        return _written_parcel(fixed, items, {}, 0 * largest, {})[0]  # not a number if one of them is not
    pieces = {name: piece(_sent_as_matrix(item), parts.get(name)) for name, item in items.items()}

    def choose(step: float, held: dict[str, Choice] | None) -> tuple[dict[str, Choice], float]:
        rest, fixed = plan.by != "components", held or {}
        with intra_op(1):  # many short operations
            chosen = {name: judged(some, step, rest, fixed.get(name)) for name, some in pieces.items()}
        return chosen, plan.least + sum(choice.bits for choice in chosen.values()) / 8

    longest = max(largest, largest_value(*(found.s for found in parts.values())))
    fit = fitted(longest, room, choose, lambda step, chosen: _written_parcel(fixed, items, parts, step, chosen))
    return fit or _written_parcel(fixed, items, {}, 0.0, {})[0]


def items_of(plan: BudgetPlan, parcel: Parcel) -> dict[str, Item]:
    alone, joined = split_leaves(plan, parcel.leaves)
    items = {}
    for name, how in alone.items():
        x = parcel.leaves[name].value.double()
        items[name] = Item(parcel.leaves[name], weight_as_matrix(x, how) if how else x, how)
    if joined:
        x = torch.cat([flat(parcel.leaves[name].value).double() for name in joined], 1)
        items[joint_name(joined)] = Item(Leaf(x), x, None)
    return items


def decode_chosen(plan: BudgetPlan, parcel: Parcel, ctx: Ctx) -> Parcel:
    if STEPS not in parcel.leaves:
        return parcel
    steps, leaves = _steps_in(parcel.leaves[STEPS]), {}
    for name, leaf in parcel.leaves.items():
        if name.startswith(JOIN) and name != STEPS:
            names = name.split(JOIN)[1:]
            step, steps = steps[:, 1:2], steps[:, 2:]
            values = (leaf.value * step).split([math.prod(plan.shapes[name]) for name in names], 1)
            for name, x in zip(names, values, strict=True):
                leaves[name] = Leaf(x.reshape(len(x), *plan.shapes[name]).to(plan.layout.dtypes[name]))
        elif name in plan.shapes:
            value = values_of_codes(leaf.value, steps[:, 1])
            if f"{name}/p" in parcel.leaves:
                p, q = (parcel.leaves[f"{name}/{side}"].value for side in "pq")
                add_components(value, p, q, steps[:, 0], plan.matrices[name])
            steps = steps[:, 2:]
            leaves[name] = Leaf(value.to(plan.layout.dtypes[name]), leaf.scope, told=leaf.told)
        elif name not in plan.factors and name != STEPS:
            leaves[name] = leaf
    return Parcel(leaves, parcel.notes)


def expect_chosen(plan: BudgetPlan, expected: Schema, ctx: Ctx) -> Schema:
    alone, joined = split_leaves(plan, expected.leaves)
    leaves = {name: spec for name, spec in expected.leaves.items() if name not in plan.shapes}
    most = min(expected.most, plan.most) if alone or joined else expected.most
    if alone or joined:
        leaves[STEPS] = Spec((2 * (len(alone) + bool(joined)),), torch.int8, scales=1, tight=True)
    for name, how in alone.items():
        if how is not None:
            for side, n in (("p", how.rows), ("q", how.columns)):
                leaves[f"{name}/{side}"] = Spec((how.rank, n), torch.int8, grains=((how.rank, 1),), tight=True)
        leaves[name] = expected.leaves[name]._replace(dtype=torch.int8, tight=True)
    if joined:
        size = sum(math.prod(plan.shapes[name]) for name in joined)
        leaves[joint_name(joined)] = Spec((size,), torch.int8, tight=True)
    return expected._replace(leaves=leaves, most=most)


def _written_parcel(
    fixed: Parcel, items: dict[str, Item], parts: dict[str, Components], step: float, chosen: dict[str, Choice]
) -> tuple[Parcel, int]:
    """One client's parcel and its bytes: what is chosen of every item, in steps of `step`."""
    leaves, notches = {}, []
    scale = torch.tensor([[step]], dtype=torch.float32)
    for name, item in items.items():
        made, longer = _coded_item(name, item, parts.get(name), float(scale), chosen.get(name, NOTHING))
        leaves |= made
        notches += longer
    device = next(iter(items.values())).x.device
    told = Leaf(torch.tensor([notches], dtype=torch.int8, device=device), scale=scale.to(device), bits=8, tight=True)
    out = Parcel(fixed.leaves | {STEPS: told} | leaves, fixed.notes)
    return out, int(nbytes(out)[0])


def _coded_item(
    name: str, item: Item, parts: Components | None, step: float, choice: Choice
) -> tuple[dict[str, Leaf], list[int]]:
    """An item's leaves, and by how many notches its two steps are longer."""
    leaves, left, how, first, second = {}, item.x, item.how, 0, 0
    if how is not None:
        p, q = (torch.zeros(1, how.rank, n, dtype=torch.int8, device=left.device) for n in (how.rows, how.columns))
        keep = p[:, :, :1].bool()
        if choice.rank and parts is not None:
            u, v = components_by_root(parts, torch.arange(how.rank, device=left.device)[None] < choice.rank)
            first = notch(step, largest_value(u, v))
            own = _number_tensor(step * NOTCHES[first], left)
            p, q, keep = factor_codes(u, v, own)
            left = left if choice.longer is None else left - component_product(p, q, own)
        leaves = {f"{name}/{side}": Leaf(x, keep=(keep,), bits=8, tight=True) for side, x in (("p", p), ("q", q))}
    codes = torch.zeros(left.shape, dtype=torch.int8, device=left.device)
    if choice.longer is not None:
        second = notch(step, largest_value(left), choice.longer)
        codes = codes_of(left, _number_tensor(step * NOTCHES[second], left))
    codes = codes if how is None else matrix_as_weight(codes, how, tuple(item.leaf.value.shape[1:]))
    leaves[name] = item.leaf._replace(value=codes.contiguous(), bits=8, tight=True)
    return leaves, [first, second]


def _sent_as_matrix(item: Item) -> Tensor:
    """What is sent of an item, `[1, rows, columns]`; in one row where it is a part of a tensor, or vectors."""
    mask = sent_mask(item.leaf)
    if mask is not None:
        return item.x[mask.expand_as(item.x)][None, None]
    return item.x.flatten(2) if item.x.ndim > 2 else item.x[:, None]


def _number_tensor(number: float, like: Tensor) -> Tensor:
    return torch.tensor([number], dtype=torch.float64, device=like.device)


def _steps_in(told: Leaf) -> Tensor:
    """`[K, 2 x items]` float64: of components and of values."""
    assert told.scale is not None
    table = torch.tensor(NOTCHES, dtype=torch.float64, device=told.value.device)
    return told.scale.double() * table[told.value.clamp(min=0).long()]


def stacked_rows(parcel: Parcel, rows: list[Parcel]) -> Parcel:
    """The rows as one; what came with the parcel beside values stays as it was."""
    leaves = {}
    for name, leaf in rows[0].leaves.items():
        same = [one.leaves[name] for one in rows]
        if leaf.tight:
            leaves[name] = leaf._replace(
                value=torch.cat([one.value for one in same]),
                scope=parcel.leaves[name].scope if name in parcel.leaves else None,
                keep=tuple(torch.cat(masks) for masks in zip(*(one.keep for one in same), strict=True)),
                scale=None if leaf.scale is None else torch.cat([x for one in same if (x := one.scale) is not None]),
            )
        else:
            leaves[name] = parcel.leaves[name]
    return Parcel(leaves, parcel.notes)


def _rooms_of(most: float, ctx: Ctx) -> list[float]:
    """The most bytes of each of these clients."""
    if ctx.budget is not None:
        return [min(most, room) for room in ctx.budget.tolist()]
    if most == math.inf:
        raise MethodError(
            "budget says no number of bytes, and the round has no deadline; write budget: 20kB, or set "
            "fleet.deadline and fleet.links"
        )
    return [most] * len(ctx.ids)
