"""Quantisers: values as few-bit codes times a scale per tensor and client, or as half floats."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import check_range
from sparing.core.method import QUANTISES, Codec, Trait, View
from sparing.core.operation import operation
from sparing.core.parcel import Leaf, Parcel, Schema, sent_mask
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, cleared, flat

Write = Callable[[str, Leaf, Tensor, Ctx], tuple[Tensor, Tensor]]
"""(name, leaf, its values `[K, n]`, ctx) -> codes `[K, n]` and scales `[K, s]`, so that code * scale is the value."""


class Quantiser(NamedTuple):
    write: Write
    drawn: bool = True  # codes depend on draws for every place
    bucket: int | None = None  # values that share a scale; None: the whole tensor


def uniform_codec(layout: Layout, bits: int, stochastic: bool = False) -> Codec:
    """Codes in [-L, L], L = 2^(bits-1) - 1, times max|v| / L. Rounds to nearest, or up and down at random, unbiased.

    The error of a value is at most half a step (one step if stochastic).
    """
    check_range("bits", bits, 2, 8)
    top = 2 ** (bits - 1) - 1
    write = equal_steps(top, largest_magnitudes, stochastic)
    return _coded_values(layout, Quantiser(write, drawn=stochastic), bits, f"int{bits}")


def qsgd_codec(layout: Layout, levels: int, bucket: int | None = None) -> Codec:
    """QSGD: codes in [-s, s], s levels, times |v|_2 / s, rounded at random so that the mean over draws is v.

    E|Q(v) - v|^2 <= min(d / s^2, sqrt(d) / s) |v|^2 for every `bucket` of d values with a norm of its own, by default
    the whole tensor.
    """
    check_range("qsgd.levels", levels, 1, 127)
    if bucket is not None:
        check_range("qsgd.bucket", bucket, 1, math.inf)
    d = max((min(n, bucket or n) for n in map(math.prod, layout.shapes.values())), default=0)
    noisy = Trait.NOISY if min(d / levels**2, math.sqrt(d) / levels) >= 1 else Trait.NONE
    write = equal_steps(levels, _euclidean_norms, stochastic=True, bucket=bucket)
    return _coded_values(layout, Quantiser(write, bucket=bucket), levels.bit_length() + 1, "qsgd", noisy)


def ternary_codec(layout: Layout) -> Codec:
    """TernGrad: -1, 0 or 1 times max|v|, drawn so that the mean over draws is v."""
    return _coded_values(
        layout, Quantiser(equal_steps(1, largest_magnitudes, stochastic=True)), 2, "ternary", Trait.NOISY
    )


def sign_codec(layout: Layout) -> Codec:
    """-1 or 1 times the mean of |v| over what is sent: |v - C(v)|^2 = (1 - |v|_1^2 / (d |v|_2^2)) |v|^2.

    One bit has no room for zero: a zero among the values takes a sign at random, so that on average it stays one.
    """

    def write(name: str, leaf: Leaf, rows: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        mask = sent_mask(leaf)
        here = None if mask is None else flat(mask.expand_as(leaf.value))
        count = rows.shape[1] if here is None else here.sum(dim=1).clamp(min=1)
        scale = (total(rows.abs()) / torch.as_tensor(count, device=rows.device).clamp(min=1)).float()
        codes = torch.where(rows < 0, -1.0, 1.0)
        zero = rows == 0
        if bool((zero if here is None else zero & here).any()):
            coin = ctx.uniform(f"coin/{name}", rows.shape[1]) < 0.5
            codes = torch.where(zero & coin, -1.0, codes)
        return cleared(codes, here), scale[:, None]

    return _coded_values(layout, Quantiser(write), 1, "sign")


def equal_steps(
    levels: int, size_of: Callable[[Tensor], Tensor], stochastic: bool = False, bucket: int | None = None
) -> Write:
    """Equal steps of `size_of(values)` / levels."""

    def write(name: str, leaf: Leaf, rows: Tensor, ctx: Ctx) -> tuple[Tensor, Tensor]:
        n = rows.shape[1]
        parts = _in_buckets(rows, bucket)
        scale = size_of(parts) * (1 / levels)  # a product: GPUs divide by a constant their own way
        codes = (parts / torch.where(scale > 0, scale, 1.0)[:, :, None]).flatten(1)[:, :n]
        if stochastic:
            codes = torch.floor(codes + ctx.uniform(f"round/{name}", n))
            codes = torch.where(rows == 0, 0.0, codes)
        else:
            codes = torch.round(codes)
        return codes.clamp_(-levels, levels), scale

    return write


@operation
def codes_of_leaf(quantiser: Quantiser, name: str, leaf: Leaf, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """Codes `[K, n]` and scales of a leaf's values."""
    return quantiser.write(name, leaf, flat(leaf.value.float()), ctx)


@operation
def values_of_leaf(quantiser: Quantiser, leaf: Leaf, scale: Tensor) -> Tensor:
    """Values `[K, n]` of a leaf's codes."""
    rows = flat(leaf.value.float())
    return (_in_buckets(rows, quantiser.bucket) * scale[:, :, None]).flatten(1)[:, : rows.shape[1]]


def largest_magnitudes(parts: Tensor) -> Tensor:
    """max|v| of every bucket, `[K, b, m]` -> `[K, b]`."""
    return parts.abs().amax(dim=2)


def _euclidean_norms(parts: Tensor) -> Tensor:
    """|v|_2 of every bucket."""
    k, b, m = parts.shape
    return total(parts.double().square().reshape(k * b, m)).sqrt().float().reshape(k, b)


def _in_buckets(rows: Tensor, bucket: int | None) -> Tensor:
    """`[K, n]` -> `[K, b, m]`: buckets of m values, the last one filled up with zeros; at least one bucket."""
    n = rows.shape[1]
    m = bucket or max(n, 1)
    short = _bucket_count(n, bucket) * m - n
    return (torch.nn.functional.pad(rows, (0, short)) if short else rows).reshape(rows.shape[0], -1, m)


def _bucket_count(n: int, bucket: int | None) -> int:
    return max(1, -(-n // bucket)) if bucket else 1


def _coded_values(layout: Layout, quantiser: Quantiser, bits: int, name: str, traits: Trait = Trait.NONE) -> Codec:
    """Float parameters as int8 codes of `bits` bits and one scale per bucket."""
    params = frozenset(layout.floats)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaf = leaves[name]
            codes, scale = codes_of_leaf(quantiser, name, leaf, view.ctx)
            value = codes.to(torch.int8).reshape(len(codes), *leaf.value.shape[1:])
            leaves[name] = leaf._replace(value=value, scale=scale, bits=bits)
        return Parcel(leaves, parcel.notes), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = dict(parcel.leaves)
        for name in leaves.keys() & params:
            leaf = leaves[name]
            assert leaf.scale is not None
            value = values_of_leaf(quantiser, leaf, leaf.scale).reshape(leaf.value.shape).to(layout.dtypes[name])
            leaves[name] = leaf._replace(value=value, scale=None, bits=32)
        return Parcel(leaves, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {
            name: spec._replace(
                dtype=torch.int8, scales=_bucket_count(math.prod(spec.shape), quantiser.bucket), bits=bits
            )
            if name in params
            else spec
            for name, spec in expected.leaves.items()
        }
        return expected._replace(leaves=leaves)

    return Codec(encode, decode, schema, name=name, effect=QUANTISES._replace(traits=traits))


def half_codec(layout: Layout, dtype: torch.dtype) -> Codec:
    """Values as float16 or bfloat16; what is too large for the format becomes its largest number."""
    params, top = frozenset(layout.floats), torch.finfo(dtype).max

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
    return Codec(encode, decode, schema, name=name, effect=QUANTISES)
