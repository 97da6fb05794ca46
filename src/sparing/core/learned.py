"""What clients have learned, as it goes up: differences from what came down, and of them the part that is shared."""

import torch
from torch import Tensor

from sparing.core.gpu import ready
from sparing.core.parcel import Cuts, Parcel, cleared
from sparing.core.product import formed
from sparing.core.tree import Grown, Trained, Tree, since


def learned(after: Trained, got: Parcel, cuts: Cuts) -> Tree:
    """`[K, ...]` of every tensor that goes up; what did not come down goes up as it is."""
    bases = {name: got.leaves[name].value if name in got.leaves else 0 for name in cuts}
    parts = {name: part for name, cut in cuts.items() if (part := to_cut(after, name, bases[name], cut.mask))}
    out: Tree = {}
    if parts:
        from sparing.core.gpu.cut import cut as at_once

        out = dict(zip(parts, at_once(list(parts.values())), strict=True))
    return {
        name: out[name] if name in out else cleared(since(after, name, bases[name]), cut.mask)
        for name, cut in cuts.items()
    }


def to_cut(after: Trained, name: str, base: Tensor | int, mask: Tensor | None) -> tuple | None:
    """Where a kernel can subtract and cut at once: its (x, base, mask)."""
    if mask is None or not ready(mask) or not isinstance(base, Tensor):
        return None
    grown = after if isinstance(after, Grown) and after.start[name] is base else None
    x = formed(after[name] if grown is None else grown.added[name])
    fine = x.dtype == base.dtype == torch.float32 and x.numel() and mask.shape[1:] == x.shape[1:]
    return (x, base if grown is None else None, mask) if fine else None
