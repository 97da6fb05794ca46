"""Quantisers: values as few-bit codes times one scale per tensor and client, or as half floats."""

import torch

from sparing.core.errors import check_range
from sparing.core.keys import Ctx
from sparing.core.parcel import Parcel, Schema
from sparing.core.protocols import Codec, View
from sparing.core.tree import Layout, Tree, column, flat


def uniform(layout: Layout, bits: int, stochastic: bool = False) -> Codec:
    """Codes in [-L, L], L = 2^(bits-1) - 1, times max|v| / L. Rounds to nearest, or up and down at random, unbiased.

    The error of a value is at most half a step (one step if stochastic).
    """
    check_range("bits", bits, 2, 8)
    top = 2 ** (bits - 1) - 1
    params = float_params(layout)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaf = leaves[name]
            value = leaf.value.float()
            rows = flat(value)
            peak = rows.abs().amax(dim=1) if rows.shape[1] else rows.new_zeros(rows.shape[0])
            scale = (peak * (1 / top))[:, None]  # a product: GPUs divide by a constant their own way
            steps = rows / torch.where(scale > 0, scale, 1.0)
            if stochastic:
                codes = torch.floor(steps + view.ctx.uniform(f"round/{name}", rows.shape[1]))
                codes = torch.where(rows == 0, 0.0, codes)
            else:
                codes = torch.round(steps)
            codes = codes.clamp_(-top, top).to(torch.int8).reshape(value.shape)
            leaves[name] = leaf._replace(value=codes, scale=scale, bits=bits)
        return Parcel(leaves, parcel.notes), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaf = leaves[name]
            assert leaf.scale is not None
            value = (leaf.value.float() * column(leaf.scale, leaf.value)).to(layout.dtypes[name])
            leaves[name] = leaf._replace(value=value, scale=None, bits=32)
        return Parcel(leaves, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {
            name: spec._replace(dtype=torch.int8, scales=1) if name in params else spec
            for name, spec in expected.leaves.items()
        }
        return expected._replace(leaves=leaves)

    return Codec(encode, decode, schema, name=f"int{bits}", lossy=True, traits=frozenset({"codes"}))


def half(layout: Layout, dtype: torch.dtype) -> Codec:
    """Values as float16 or bfloat16; what is too large for the format becomes its largest number."""
    params, top = float_params(layout), torch.finfo(dtype).max

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaves[name] = leaves[name]._replace(value=leaves[name].value.clamp(-top, top).to(dtype))
        return Parcel(leaves, parcel.notes), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaves[name] = leaves[name]._replace(value=leaves[name].value.to(layout.dtypes[name]))
        return Parcel(leaves, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {
            name: spec._replace(dtype=dtype) if name in params else spec for name, spec in expected.leaves.items()
        }
        return expected._replace(leaves=leaves)

    name = "fp16" if dtype == torch.float16 else "bf16"
    return Codec(encode, decode, schema, name=name, lossy=True, traits=frozenset({"codes"}))


def float_params(layout: Layout) -> frozenset[str]:
    return frozenset(name for name in layout.params if layout.dtypes[name].is_floating_point)
