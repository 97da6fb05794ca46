"""How many bytes a client of a method is sent and sends in a round, at most: what its codecs' schemas allow.

A share may let through other parts of the model in other rounds. So what is bounded is everything that it ever lets
through, as far as it does not promise to stay below a number of parameters (`Share.most`).
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from sparing.core.compose import uplink
from sparing.core.context import Ctx
from sparing.core.method import Method
from sparing.core.parcel import Cut, Cuts, Limit, Parcel, Schema, spec_of_cut
from sparing.core.round import NOTES_UP
from sparing.core.tree import Layout
from sparing.wire.bound import most_bytes, most_values


class ByteBounds(NamedTuple):
    down: int
    up: int
    sent: int | None  # parameters of which the upload has values; None: it has something else of some


def bounds_of(method: Method, sent: Sequence[tuple[Parcel, Ctx]], syncs: bool = False) -> ByteBounds:
    """From what a client of this size was sent (K = 1) in some rounds, among them a first contact if that counts.

    `syncs`: rounds in which everything is shared count too.
    """
    layout, share = method.layout, method.share
    cuts = [cuts_in(down) for down, _ in sent]
    votes = [share.up(one, ctx) for one, (_, ctx) in zip(cuts, sent, strict=True)]
    notes = {name: x[0].numel() for down, _ in sent for name, x in down.notes.items()}
    less = share.most is not None and not (syncs and share.syncs)
    within = less and all(shared_values(one, layout, layout.params) <= (share.most or 0) for one in cuts)
    down = [_schema_of(one, method, notes, within) for one in _everything(layout, cuts)]
    up = [
        uplink(method).schema(_schema_of(one, method, NOTES_UP, less), ctx)
        for one in _everything(layout, votes)
        for _, ctx in sent
    ]
    plain = all(name in layout.shapes for schema in up for name in schema.leaves)
    values = [schema._replace(leaves={n: x for n, x in schema.leaves.items() if n in layout.params}) for schema in up]
    most = max(map(most_values, values)) if plain else None
    return ByteBounds(max(map(most_bytes, down)), max(map(most_bytes, up)), most)


def cuts_in(parcel: Parcel) -> Cuts:
    return {name: Cut(leaf.scope, leaf.told) for name, leaf in parcel.leaves.items()}


def shared_values(cuts: Cuts, layout: Layout, names: Iterable[str]) -> int:
    """How many values of these tensors the cuts (K = 1) let through."""
    found = 0
    for name in names:
        if name in cuts:
            shape, mask = layout.shapes[name], cuts[name].mask
            found += math.prod(shape) if mask is None else int(mask.expand(1, *shape).sum())
    return found


def _schema_of(cuts: Cuts, method: Method, notes: dict[str, int], within: bool) -> Schema:
    """`within`: no more parameters than the share says."""
    layout, most = method.layout, method.share.most
    leaves = {name: spec_of_cut(layout.shapes[name], layout.dtypes[name], cut) for name, cut in cuts.items()}
    names = frozenset(layout.params) & cuts.keys()
    return Schema(leaves, notes, limit=Limit(names, most, most) if within and most is not None else None)


def _everything(layout: Layout, seen: Sequence[Cuts]) -> list[Cuts]:
    """All that these cuts ever let through: as whole tensors and, where they cut, as parts that happen to be whole."""
    whole: Cuts = {}
    parts: Cuts = {}
    for cuts in seen:
        for name, cut in cuts.items():
            told = cut.told or (name in whole and whole[name].told)
            full = torch.ones((), dtype=torch.bool).expand(1, *layout.shapes[name])
            is_part = cut.mask is not None or (name in parts and parts[name].mask is not None)
            whole[name], parts[name] = Cut(None, told), Cut(full if is_part else None, told)
    return [whole, parts] if any(cut.mask is not None for cut in parts.values()) else [whole]
