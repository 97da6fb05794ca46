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

        whole, pieces = at_once(list(parts.values()))
        out = dict(zip(parts, pieces, strict=True))
        if isinstance(after, Grown):
            grown = zip(parts.items(), whole, strict=True)
            after.formed |= {name: x for (name, part), x in grown if part[1] is not None}
    return {
        name: out[name] if name in out else cleared(since(after, name, bases[name]), cut.mask)
        for name, cut in cuts.items()
    }


def to_cut(after: Trained, name: str, base: Tensor | int, mask: Tensor | None) -> tuple | None:
    """Where a kernel can add, subtract and cut at once: its (x, what that was added to, base, mask)."""
    if mask is None or not ready(mask) or not isinstance(base, Tensor):
        return None
    start = after.start[name] if isinstance(after, Grown) and name not in after.formed else None
    x = formed(after[name] if start is None else after.added[name])  # pyright: ignore
    fine = x.dtype == base.dtype == torch.float32 and x.numel() and mask.shape[1:] == x.shape[1:]
    return ((x, None, None, mask) if start is base else (x, start, base, mask)) if fine else None


def overlaid(parts: dict[str, tuple[Tensor, Tensor, Tensor]]) -> Tree:
    """Of each (own, new, mask) new where the mask is true, else own; on a GPU in one pass."""
    fine = {
        name: (own, new, mask)
        for name, (own, new, mask) in parts.items()
        if ready(own) and own.dtype == new.dtype == torch.float32 and own.numel() and mask.shape[1:] == own.shape[1:]
    }
    out: Tree = {}
    if fine:
        from sparing.core.gpu.cut import overlay as at_once

        out = dict(zip(fine, at_once(list(fine.values())), strict=True))
    return out | {n: torch.where(mask, new, own) for n, (own, new, mask) in parts.items() if n not in out}
