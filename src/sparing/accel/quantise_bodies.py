"""Quantising on a CPU where little of a large tensor is sent: what is not sent is not looked at."""

import torch
from torch import Tensor

from sparing.accel.reduce_bodies import scarce
from sparing.core.context import Ctx
from sparing.core.parcel import Leaf, sent_mask
from sparing.core.tree import flat
from sparing.parts.code import quantisers
from sparing.parts.code.quantisers import Quantiser


def fast_codes_of_leaf(quantiser: Quantiser, name: str, leaf: Leaf, ctx: Ctx) -> tuple[Tensor, Tensor]:
    """`quantisers.codes_of_leaf`; codes that are drawn depend on the place of a value."""
    found = None if quantiser.drawn else _sent_at(leaf)
    if found is None:
        return quantisers.codes_of_leaf.plain(quantiser, name, leaf, ctx)
    rows = flat(leaf.value.float())
    codes, scales = torch.zeros(rows.shape, dtype=torch.int8), []
    for places, row, out in zip(found, rows, codes, strict=True):
        some, scale = quantiser.write(name, leaf, row[places][None], ctx)
        out[places] = some[0].to(torch.int8)
        scales.append(scale)
    return codes, torch.cat(scales)


def fast_values_of_leaf(quantiser: Quantiser, leaf: Leaf, scale: Tensor) -> Tensor:
    """`quantisers.values_of_leaf`."""
    found = _sent_at(leaf) if scale.shape[1] == 1 else None
    if found is None:
        return quantisers.values_of_leaf.plain(quantiser, leaf, scale)
    out = torch.zeros(len(found), leaf.value[0].numel())
    for places, row, codes, step in zip(found, out, flat(leaf.value), scale, strict=True):
        row[places] = codes[places].float() * step
    return out


def _sent_at(leaf: Leaf) -> list[Tensor] | None:
    """For each client the places of what it sends, where all send little of a large tensor."""
    mask = sent_mask(leaf)
    if mask is None:
        return None
    found = [scarce(row) for row in flat(mask.expand_as(leaf.value))]
    return None if any(places is None for places in found) else [places for places in found if places is not None]
