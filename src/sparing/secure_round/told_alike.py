"""What every client of a sum must have been told alike, as one digest in the terms of the sum.

A lying server could else tell all but one client something by which nothing of them is left in the sum: a coarser grid,
a study with another learning rate, or a model that learns nothing (Pasquini et al. 2022, arXiv:2111.07380). Terms stand
in every signature and key, so clients that were told different things do not mask towards each other.

It covers the study, the grid, all numbers of the round, and of the model what comes down to everybody. It cannot cover
what a client keeps for itself, or is sent at first contact alone.
"""

import hashlib

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.method import Method
from sparing.core.parcel import Leaf, Parcel
from sparing.core.round import voting_masks
from sparing.core.tree import prefixed, tree_sha256
from sparing.secure_round.summands import RoundSum


def told_alike(study: bytes, method: Method, sums: RoundSum, got: Parcel, ctx: Ctx) -> bytes:
    """Of one client (K = 1) that got this; `study` is the digest of what it was told when it joined."""
    numbers = [ctx.round, ctx.rounds, ctx.clients, ctx.held, ctx.samples, ctx.cohort]
    masks = voting_masks(method, got, ctx)
    values = {name: _part_for_all(leaf, masks.get(name, leaf.scope)) for name, leaf in got.leaves.items()}
    told = {"numbers": torch.tensor(numbers), "total": torch.tensor(sums.total, dtype=torch.float64)}
    told |= prefixed("limit", {leaf.name: sums.grid.limit(leaf.name) for leaf in sums.layout.leaves})
    told |= prefixed("value", values) | prefixed("note", dict(got.notes))
    return hashlib.sha256(b"sparing/secure/told alike/" + study + bytes.fromhex(tree_sha256(told))).digest()


def _part_for_all(leaf: Leaf, mask: Tensor | None) -> Tensor:
    value = leaf.value[0]
    return value if mask is None else value[mask.to(value.device).expand(1, *value.shape)[0]]
