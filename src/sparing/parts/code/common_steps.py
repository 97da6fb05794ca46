"""8-bit codes with steps that are the same for all clients, so that codes add up as they are.

A step is a power of two, one for each tensor, and comes down with the model. Each client says how large its update is,
as the exponent p_k of a power of two above every entry, and the next step covers twice their mean:

    step = 2^(ceil(sum w_k p_k / sum w_k) + 1 - 7)      codes in [-127, 127]

What lies beyond is cut off; `memory` sends it later. Steps are never so small that codes times weights would be rounded
on the fold's grid: then the sum of codes and the sum of values are the same number.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.grid import GRID_STEP, limits_of
from sparing.core.method import QUANTISES, Arrival, Blended, Codec, Report, Rows, Serving, Step, Trait, View
from sparing.core.ops import bounds
from sparing.core.parcel import Parcel, Schema
from sparing.core.tree import Layout, Tree, column, flat

STEPS, SIZES = "steps", "sizes"
"""Notes: the exponents of the steps, down, and of the updates' sizes, up; one for each floating tensor."""
_BITS, _LARGEST_CODE = 8, 127
_MAGNITUDE_BITS = _BITS - 1  # a code without its sign
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -100, 100


def steps_in(notes: Mapping[str, Tensor], layout: Layout) -> dict[str, float]:
    """The steps that came down to one client (K = 1), by tensor; none where codes have no common steps."""
    if STEPS not in notes:
        return {}
    return {name: 2.0**e for name, e in zip(layout.floats, notes[STEPS][0].tolist(), strict=True)}


def common_steps_codec(layout: Layout, stochastic: bool = False) -> Codec:
    names = layout.floats

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        exponents = view.notes[STEPS].to(torch.float64)  # [K, tensors]
        leaves, sizes = dict(parcel.leaves), exponents + _MAGNITUDE_BITS - 1  # of what is not sent: as the step says
        for i, name in enumerate(names):
            if name not in leaves:
                continue
            leaf, rows = leaves[name], flat(leaves[name].value.float())
            step_K = torch.exp2(exponents[:, i]).float()
            codes = rows / step_K[:, None]
            codes = (
                torch.floor(codes + view.ctx.uniform(f"round/{name}", rows.shape[1])) if stochastic else codes.round()
            )
            codes = torch.where(rows == 0, 0.0, codes).clamp_(-_LARGEST_CODE, _LARGEST_CODE).to(torch.int8)
            leaves[name] = leaf._replace(
                value=codes.view(leaf.value.shape), scale=step_K[:, None].expand(len(rows), 1), bits=_BITS
            )
            sizes[:, i] = torch.where((rows != 0).any(dim=1), _exponents(rows), sizes[:, i])
        return Parcel(leaves, parcel.notes | {SIZES: sizes.float()}), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = dict(parcel.leaves)
        for name in names:
            if name in leaves and leaves[name].scale is not None:
                leaf = leaves[name]
                value = leaf.value.to(layout.dtypes[name]) * column(leaf.scale[:, 0], leaf.value)  # type: ignore[index]
                leaves[name] = leaf._replace(value=value, scale=None, bits=32)
        return parcel._replace(leaves=leaves)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {
            name: spec._replace(dtype=torch.int8, scales=1, bits=_BITS) if name in names else spec
            for name, spec in expected.leaves.items()
        }
        return expected._replace(leaves=leaves, notes=expected.notes | {SIZES: len(names)})

    return Codec(encode, decode, schema, name="int8", effect=QUANTISES._replace(traits=Trait.SUMMABLE))


def common_steps_step(layout: Layout) -> Step:
    """The server's part: it says how large the steps are, and learns from how large updates were."""
    names = layout.floats

    def init(model: Tree, clients: int) -> Tree:
        sizes = bounds({name: model[name] for name in names})
        largest = sizes.max() if len(sizes) else sizes
        return {STEPS: _exponents(torch.where(sizes > 0, sizes, largest)[:, None])[None] - _MAGNITUDE_BITS}

    def serve(state: Tree, model: Tree, ctx: Ctx, rows: Rows | None) -> tuple[Tree, dict[str, Tensor]]:
        steps = torch.maximum(state[STEPS], _smallest_steps({name: model[name] for name in names}, ctx))
        return model, {STEPS: steps.float().expand(len(ctx.ids), -1)}

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {SIZES: arrival.notes[SIZES].double().nan_to_num().clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        weight, sizes = ctx.placed(blended.weight), blended.seen[SIZES]
        mean = (weight[:, None] * sizes).sum(0) / weight.sum()
        mean = mean.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)  # in a sum of sizes a client may lie
        said = {"largest_step": torch.exp2(state[STEPS].max())} if names else {}
        return blended.update, {STEPS: (mean.ceil() + 1 - _MAGNITUDE_BITS)[None]}, said

    return Step(apply, init, watch, "int8", serving=Serving(serve, {STEPS: len(names)}), pooled={SIZES: len(names)})


def _smallest_steps(model: Tree, ctx: Ctx) -> Tensor:
    """Exponents of the smallest steps with which no code times a weight is rounded: `[1, tensors]`."""
    weights = math.ceil(math.log2(max(ctx.samples, ctx.cohort, 1)))
    return (limits_of(model).largest * GRID_STEP).log2().round()[None] + weights


def _exponents(rows: Tensor) -> Tensor:
    """p with |x| <= 2^p for all entries of a row: `[K, n]` -> `[K]` float64."""
    largest = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(len(rows))
    return torch.frexp(largest).exponent.double().clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
