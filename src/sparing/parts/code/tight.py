"""Masks and codes in as few bytes as any of our codes takes: every one is tried, nothing of a value changes."""

import torch

from sparing.core.context import Ctx
from sparing.core.method import Codec, Effect, Form, View
from sparing.core.parcel import Parcel, Schema
from sparing.core.tree import Tree


def tight_codec() -> Codec:
    """For every leaf that has an index or codes. Counting bytes takes as long as writing them."""

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = dict(parcel.leaves)
        for name, leaf in leaves.items():
            coded = leaf.value.dtype == torch.int8
            if leaf.keep or leaf.told or coded:
                leaves[name] = leaf._replace(tight=True, bits=8 if coded else leaf.bits)
        return Parcel(leaves, parcel.notes), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        return Parcel({name: leaf._replace(tight=False) for name, leaf in parcel.leaves.items()}, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {
            name: spec._replace(tight=bool(spec.grains) or spec.told or spec.dtype == torch.int8)
            for name, spec in expected.leaves.items()
        }
        return expected._replace(leaves=leaves)

    return Codec(encode, decode, schema, name="tight", effect=Effect(Form.WRITTEN, Form.WRITTEN, lossy=False))
