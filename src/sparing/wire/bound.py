"""How many bytes a parcel can take at most, from its schema alone: every index a bitmap, every code at full width.

The rules are those of `section` and `count`; no code is ever longer, since the shortest of several is written.
"""

import math
from typing import NamedTuple

import torch

from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.wire.frame import SHORTEST, nbytes
from sparing.wire.index import packed_size, varint_size
from sparing.wire.section import CODES


class _LeafBound(NamedTuple):
    """The most that one leaf holds; a byte of each index says how it is written, and each begins a byte of its own."""

    values: int
    bits: int  # of a value
    inside: int  # positions in scope
    scopes: int  # indices that tell of each of them
    other: int  # bytes of other indices, scales and codes' own bytes

    @property
    def places(self) -> int:
        return self.scopes * self.inside

    @property
    def bytes(self) -> int:
        return packed_size(self.values, self.bits) + packed_size(self.places, 1) + self.other


def most_bytes(schema: Schema) -> int:
    """No parcel of this schema takes more.

    >>> most_bytes(Schema({"w": Spec((10,))}, {}))
    60
    >>> most_bytes(Schema({"w": Spec((1000,), grains=((1000,),), most=10)}, {}))
    189
    """
    leaves = {name: _leaf_bound(spec) for name, spec in schema.leaves.items()}
    body = sum(varint_size(one.bytes) for one in leaves.values()) + _content_bytes(leaves, schema)
    notes = 4 * sum(schema.notes.values())
    body += varint_size(notes) + notes
    longest = SHORTEST - 1 + varint_size(body) + body
    if schema.most >= longest:
        return longest
    return min(longest, max(int(schema.most), _empty_bytes(schema)))


def most_values(schema: Schema) -> int:
    """How many values are sent of the leaves of this schema, at most."""
    counts = {name: _leaf_bound(spec).values for name, spec in schema.leaves.items()}
    limit = schema.limit
    together = [] if limit is None else [n for name, n in counts.items() if name in limit.names]
    return sum(counts.values()) - sum(together) + min(sum(together), limit.sent if limit else 0)


def _leaf_bound(spec: Spec) -> _LeafBound:
    n = math.prod(spec.shape)
    inside = n if spec.scope is None or spec.told else int(spec.scope.expand(1, *spec.shape).sum())
    coarse = [math.prod(grain) for grain in spec.grains if grain != spec.shape] + [n] * spec.told
    scopes = len(spec.grains) + spec.told - len(coarse)
    other = sum(1 + packed_size(grain, 1) for grain in coarse) + 2 * scopes + 4 * spec.scales
    bits = 8 * spec.dtype.itemsize
    if spec.dtype == CODES:
        bits = min(8, max(2, spec.bits)) if spec.tight else spec.bits  # tight codes are in two's complement
        other += 2 if spec.tight else 1
    count = inside if spec.most is None else min(inside, spec.most)
    return _LeafBound(count, bits, inside, scopes, other)


def _content_bytes(leaves: dict[str, _LeafBound], schema: Schema) -> int:
    """All sections without their lengths."""
    limit = schema.limit
    together = {} if limit is None else {name: one for name, one in leaves.items() if name in limit.names}
    total = sum(one.bytes for name, one in leaves.items() if name not in together)
    if limit is None or not together:
        return total
    alone = sum(one.bytes for one in together.values())
    left, values = limit.sent, 0
    for one in sorted(together.values(), key=lambda one: -one.bits):  # as if the widest were all sent
        taken = min(one.values, left)
        left, values = left - taken, values + packed_size(taken, one.bits)
    scopes = max(one.scopes for one in together.values())
    places = min(sum(one.places for one in together.values()), scopes * limit.shared)
    limited = values + packed_size(places, 1) + 2 * len(together) + sum(one.other for one in together.values())
    return total + min(alone, limited)


def _empty_bytes(schema: Schema) -> int:
    """What a parcel takes in which nothing is kept and all codes are zero."""
    leaves = {
        name: Leaf(
            torch.zeros(1, *spec.shape, dtype=spec.dtype),
            None if spec.told else spec.scope,
            tuple(torch.zeros(1, *grain, dtype=torch.bool) for grain in spec.grains),
            torch.zeros(1, spec.scales) if spec.scales else None,
            spec.bits,
            tight=spec.tight,
        )
        for name, spec in schema.leaves.items()
    }
    told = sum(1 + packed_size(math.prod(spec.shape), 1) for spec in schema.leaves.values() if spec.told)
    notes = {name: torch.zeros(1, size) for name, size in schema.notes.items()}
    return int(nbytes(Parcel(leaves, notes))[0]) + told
