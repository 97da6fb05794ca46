# pyright: reportPrivateImportUsage=false
# torch._foreach_* are what torch.optim itself is written in, but carry no public name.
"""Bodies of `core.ops` on a GPU, many tensors at once, and for models whose sums and products nobody has formed yet."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sparing.accel.compiled.row_bodies import cut_differences, overlaid_rows
from sparing.accel.cuda import takes_kernels
from sparing.accel.grown import Grown, since
from sparing.accel.lazy_product import Product, formed, subtract_lazily
from sparing.accel.rows import in_one_row
from sparing.core import ops
from sparing.core.tree import Masks, Tree, cleared


def fast_clear(tree: Tree, masks: Masks) -> Tree:
    """`ops.clear`, many tensors of a GPU in one operation."""
    shared = {name: mask for name, mask in masks.items() if mask is not None}
    some = [n for n, mask in shared.items() if mask.is_cuda and mask.shape == tree[n].shape and mask.numel()]
    if len({tree[name].dtype for name in some}) != 1:
        some = []
    values: Tree = {}
    if some:
        row = cleared(in_one_row([tree[name] for name in some]), in_one_row([shared[name] for name in some]))
        parts = row.split([math.prod(tree[name].shape[1:]) for name in some], 1)
        values = {name: part.view(tree[name].shape) for name, part in zip(some, parts, strict=True)}
    return {name: values[name] if name in values else cleared(tree[name], mask) for name, mask in masks.items()}


def fast_overlay(own: Tree, new: Tree, masks: Masks) -> Tree:
    """`ops.overlay`, parts of tensors of a GPU in one pass."""
    parts = {n: (own[n], x, mask) for n, x in new.items() if (mask := masks.get(n)) is not None}
    fine = {
        name: (mine, x, mask)
        for name, (mine, x, mask) in parts.items()
        if takes_kernels(mine)
        and mine.dtype == x.dtype == torch.float32
        and mine.numel()
        and mask.shape[1:] == mine.shape[1:]
    }
    if not fine:
        written = {n: found for n, part in parts.items() if (found := overlaid_rows(*part)) is not None}
        return ops.overlay.plain(own, {n: x for n, x in new.items() if n not in written}, masks) | written
    from sparing.accel.cuda.cut import overlay_parts as at_once

    written = dict(zip(fine, at_once(list(fine.values())), strict=True))
    return own | ops.overlay.plain(own, {n: x for n, x in new.items() if n not in fine}, masks) | written


def fast_increments(after: Mapping[str, Tensor], base: Tree, masks: Masks) -> Tree:
    """`ops.increments`; what training added to just that base is there already, and products stay products."""
    parts = {name: part for name, mask in masks.items() if (part := _to_cut(after, name, base.get(name), mask))}
    out: Tree = {}
    if parts:
        from sparing.accel.cuda.cut import cut_parts as at_once

        whole, pieces = at_once(list(parts.values()))
        out = dict(zip(parts, pieces, strict=True))
        if isinstance(after, Grown):
            grown = zip(parts.items(), whole, strict=True)
            after.formed |= {name: x for (name, part), x in grown if part[1] is not None}
    return {n: out[n] if n in out else _cut_difference(after, n, base.get(n), mask) for n, mask in masks.items()}


def _cut_difference(after: Mapping[str, Tensor], name: str, base: Tensor | None, mask: Tensor | None) -> Tensor:
    grown = isinstance(after, Grown) and base is not None and after.start[name] is base
    if mask is not None and base is not None and not grown and not mask.is_cuda:
        x = after[name]
        found = None if isinstance(x, Product) else cut_differences(x, base, mask)
        if found is not None:
            return found
    return cleared(_difference(after, name, base), mask)


def _difference(after: Mapping[str, Tensor], name: str, base: Tensor | None) -> Tensor:
    if not isinstance(after, Grown) and base is not None and isinstance(after[name], Product):
        return subtract_lazily(after[name], base)
    return since(after, name, base)


def _to_cut(after: Mapping[str, Tensor], name: str, base: Tensor | None, mask: Tensor | None) -> tuple | None:
    """Where a kernel can add, subtract and cut at once: its (x, what that was added to, base, mask)."""
    if mask is None or not takes_kernels(mask) or base is None:
        return None
    start = after.start[name] if isinstance(after, Grown) and name not in after.formed else None
    x = formed(after[name] if start is None else after.added[name])  # pyright: ignore
    fine = x.dtype == base.dtype == torch.float32 and x.numel() and mask.shape[1:] == x.shape[1:]
    return ((x, None, None, mask) if start is base else (x, start, base, mask)) if fine else None


def fast_against_model(model: Tree, base: Tree, added: Tree, masks: Masks) -> Tree:
    """`ops.against_model`, parts of tensors of a GPU in few operations."""
    parts = [n for n in added if n in base and (mask := masks[n]) is not None and mask.is_cuda]
    parts = [n for n in parts if base[n] is not model[n]]
    if len(parts) < 2:
        return ops.against_model.plain(model, base, added, masks)
    away = torch._foreach_sub([base[name] for name in parts], [model[name] for name in parts])
    moved = torch._foreach_add([formed(added[name]) for name in parts], away)
    shifted = fast_clear(dict(zip(parts, moved, strict=True)), {name: masks[name] for name in parts})
    rest = ops.against_model.plain(model, base, {n: x for n, x in added.items() if n not in shifted}, masks)
    return {name: shifted[name] if name in shifted else rest[name] for name in added}


def fast_add_each(xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
    """`ops.add_each` in few operations."""
    return list(torch._foreach_add(formed(xs), ys)) if xs else []


def fast_move_model(model: Tree, update: Tree, masks: Masks) -> Tree:
    """`ops.move_model`, many tensors of a GPU together."""
    wide = [n for n in update if model[n].is_cuda and model[n].dtype == torch.float32]
    masked = [name for name in wide if masks.get(name) is not None]
    new: Tree = {}
    for some in (masked, [name for name in wide if name not in masked]):
        if not some:
            continue
        old, moves = (in_one_row([tree[name] for name in some])[0] for tree in (model, update))
        parts = torch.add(old, moves.double(), out=torch.empty_like(old))  # added in float64 all the same
        if some is masked:
            parts = torch.where(in_one_row([masks[name] for name in some])[0], parts, old)  # pyright: ignore
        pieces = parts.split([model[name].numel() for name in some])
        new |= {name: part.view_as(model[name]) for name, part in zip(some, pieces, strict=True)}
    return ops.move_model.plain(model, {n: x for n, x in update.items() if n not in new}, masks) | new


def fast_bounds(tree: Mapping[str, Tensor]) -> Tensor:
    """`ops.bounds`, tensors of a GPU in few operations; of a product no less than it."""
    plain = {n: x for n, x in tree.items() if x.is_cuda and x.is_floating_point() and not isinstance(x, Product)}
    plain = {name: x for name, x in plain.items() if x.numel()}
    norms = torch._foreach_norm(list(plain.values()), math.inf, torch.float64) if plain else ()
    found = dict(zip(plain, norms, strict=True))
    if not tree:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([found[name] if name in found else _bound(x) for name, x in tree.items()])


def _bound(x: Tensor) -> Tensor:
    if isinstance(x, Product):
        return x.at_most() if x.whole is None else _bound(x.whole)
    return ops.largest_magnitude(x)


def fast_is_formed(x: Tensor) -> bool:
    """`ops.is_formed`: a product may not be yet."""
    return not isinstance(x, Product) or x.whole is not None
