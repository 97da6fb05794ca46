"""Sparsifiers: top-k (positions depend on the data, so their index is paid for) and random-k (keyed, so it is free).

Only parameters are thinned out; buffers pass whole.
"""

import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, check_range
from sparing.core.keys import hashes
from sparing.core.method import FIXED, SPARSIFIES, Codec, Form, Trait, View
from sparing.core.parcel import Leaf, Limit, Parcel, Schema, both_masks
from sparing.core.reduce import keep_largest, total
from sparing.core.tree import Layout, Tree, cleared, column, flat
from sparing.parts.factors import adapter_pairs

log = logging.getLogger("sparing")


def topk_codec(layout: Layout, ratio: float, mode: str = "exact", over: str = "layer") -> Codec:
    """Keep the max(1, ceil(ratio * P)) largest of the P shared entries, per layer or over the whole model.

    Per layer, both factors of an adapter are one, in which an entry counts by how far it moves their product
    (`product_moves`). `mode="quantile"` keeps |g| >= quantile(|g|, 1 - ratio)
    of every tensor instead, as some implementations do. Zeros are never sent.
    """
    check_range("topk.ratio", ratio, 0, 1, open_low=True)
    if mode not in ("exact", "quantile"):
        raise ConfigError(f"topk.mode is {mode!r}; use 'exact' or 'quantile'")
    if over not in ("layer", "model"):
        raise ConfigError(f"topk.over is {over!r}; use 'layer' or 'model'")
    if ratio == 1:
        return Codec(encode=lambda parcel, state, view: (parcel, state), name="topk")
    params = frozenset(layout.params)
    pairs = adapter_pairs(params) if (mode, over) == ("exact", "layer") else []

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        chosen = {name: leaf for name, leaf in parcel.leaves.items() if name in params}
        values = [leaf.value for leaf in chosen.values()]
        sizes = [entries_in_scope(leaf) for leaf in chosen.values()]
        find = largest_share if mode == "exact" else above_quantile
        if over == "model" and chosen:
            found = over_all(find, values, sizes, ratio)
        else:
            here = [pair for pair in pairs if can_compare(pair, chosen, view)]
            found = in_groups(find, values, moves_of(here, chosen, view), sizes, groups_of(list(chosen), here), ratio)
        leaves = dict(parcel.leaves)
        for (name, leaf), (keep, value) in zip(chosen.items(), found, strict=True):
            leaves[name] = leaf._replace(value=value, keep=(*leaf.keep, keep))
        if chosen and log.isEnabledFor(logging.DEBUG):
            say_sparsity([leaves[name] for name in chosen])
        return Parcel(leaves, parcel.notes), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves, names = dict(expected.leaves), sorted(params & expected.leaves.keys())
        for group in groups_of(names, pairs):
            together = sum(math.prod(leaves[names[i]].shape) for i in group)
            for spec, name in ((leaves[names[i]], names[i]) for i in group):
                most = spec.most
                if mode == "exact" and over == "layer":
                    most = min(share_of_number(together, ratio), math.prod(spec.shape))
                leaves[name] = spec._replace(grains=(*spec.grains, spec.shape), most=most)
        return expected._replace(leaves=leaves, limit=limited(expected))

    def limited(expected: Schema) -> Limit | None:
        """What is sent of all layers; a quantile sends all that are equal to it."""
        limit, names = expected.limit, params & expected.leaves.keys()
        if mode == "quantile" or (limit is None and over == "layer" and not pairs):
            return limit
        every = sum(math.prod(expected.leaves[name].shape) for name in names)
        limit = limit or Limit(names, every, every)
        spare = len(names) if over == "layer" else 0  # each is rounded up
        sent = share_of_number(limit.shared, ratio) + spare
        return limit._replace(sent=min(limit.sent, sent)) if limit.names <= names else limit

    compares = Form.CODES if over == "model" else Form.VALUES  # codes of layers are scaled apart
    return Codec(encode, schema=schema, name="topk", effect=SPARSIFIES._replace(refuses=FIXED | compares))


def randk_codec(layout: Layout, ratio: float, unbiased: bool = False, shared: bool = False) -> Codec:
    """Keep max(1, ceil(ratio * P)) entries drawn from (seed, round, client), or with `shared` from (seed, round).

    `unbiased` scales them by P / k.
    """
    check_range("randk.ratio", ratio, 0, 1, open_low=True)
    if ratio == 1:
        return Codec(encode=lambda parcel, state, view: (parcel, state), name="randk")
    params = frozenset(layout.params)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves = dict(parcel.leaves)
        for name in params & leaves.keys():
            leaf = leaves[name]
            mask, boost_K = drawn(name, leaf.value.shape[1:], leaf.scope, view.ctx)
            value = leaf.value * column(boost_K, leaf.value).to(leaf.value.dtype) if unbiased else leaf.value
            keep = tuple(k & mask if k.shape[1:] == mask.shape[1:] else k for k in leaf.keep)
            leaves[name] = leaf._replace(value=cleared(value, mask), scope=both_masks(leaf.scope, mask), keep=keep)
        return Parcel(leaves, parcel.notes), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = dict(expected.leaves)
        for name in params & leaves.keys():
            spec = leaves[name]
            leaves[name] = spec._replace(scope=both_masks(spec.scope, drawn(name, spec.shape, spec.scope, ctx)[0]))
        return expected._replace(leaves=leaves)

    def drawn(name: str, shape: tuple[int, ...], scope: Tensor | None, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """The mask `[K, *shape]` within scope, and P / k for every client."""
        size = math.prod(shape)
        words = hashes((ctx.common if shared else ctx).keys(f"randk/{name}"), size)
        if scope is not None:
            words = words.expand(max(len(words), len(scope)), -1)
            inside = flat(scope.expand(len(words), *shape))
            words = words.masked_fill(~inside, torch.iinfo(torch.int64).max)
            size_K = inside.sum(dim=1)
        else:
            size_K = torch.full((len(words),), size, device=words.device)
        k_K = share_of(size_K, ratio)
        cut = words.sort(dim=1).values.gather(1, (k_K - 1).clamp(min=0)[:, None]) if size else words
        mask = (words <= cut) & (k_K > 0)[:, None]
        mask = mask.reshape(len(words), *shape)
        return mask if scope is None else mask & scope, size_K / k_K.clamp(min=1)

    traits = (Trait.AMPLIFIES if unbiased else Trait.NONE) | (Trait.SUMMABLE if shared else Trait.NONE)
    effect = SPARSIFIES._replace(traits=traits, refuses=FIXED | Form.CODES if unbiased else SPARSIFIES.refuses)
    return Codec(encode, schema=schema, name="randk", effect=effect)


Size = int | Tensor
"""How many entries of a tensor are in scope: one number for all clients, or one each, `[K]`."""
Kept = list[tuple[Tensor, Tensor]]
"""Of many tensors, which entries are sent, and these, with zeros for the others."""


def entries_in_scope(leaf: Leaf) -> Size:
    n = math.prod(leaf.value.shape[1:])
    if leaf.scope is None:
        return n
    return flat(leaf.scope.expand(-1, *leaf.value.shape[1:])).sum(dim=1).expand(leaf.value.shape[0])


def groups_of(names: list[str], pairs: list[tuple[str, str]]) -> list[list[int]]:
    """The places of these names, those of a pair together.

    >>> groups_of(["v.b", "w", "v.a"], [("v.b", "v.a"), ("q.b", "q.a")])
    [[0, 2], [1]]
    """
    place, other = {name: i for i, name in enumerate(names)}, {}
    for b, a in pairs:
        if b in place and a in place:
            other[b] = a
    behind = set(other.values())
    return [[i, place[other[n]]] if n in other else [i] for n, i in place.items() if n not in behind]


def can_compare(pair: tuple[str, str], leaves: dict[str, Leaf], view: View) -> bool:
    """Whether both are there as values, some of them, and what they have become is known."""
    here = [leaves[name].value for name in pair if name in leaves and name in view.after]
    return len(here) == len(pair) and all(x.is_floating_point() and x.numel() > 0 for x in here)


def moves_of(pairs: list[tuple[str, str]], leaves: dict[str, Leaf], view: View) -> list[Tensor]:
    """What the entries of every tensor are compared by: in a pair by what they do to its product."""
    moves = {name: leaf.value for name, leaf in leaves.items()}
    for b, a in pairs:
        moves[b], moves[a] = product_moves(moves[b], moves[a], view.after[b], view.after[a])
    return list(moves.values())


def in_groups(
    find: Callable[..., Kept], values: list[Tensor], moves: list[Tensor], sizes: list[Size], groups: list[list[int]],
    ratio: float,
) -> Kept:  # fmt: skip
    """The same over each group in one row; `moves` is what entries are compared by."""
    rows = [torch.cat([flat(moves[j]) for j in group], 1) if len(group) > 1 else moves[group[0]] for group in groups]
    found, kept = find(rows, [sum([sizes[j] for j in more], sizes[i]) for i, *more in groups], ratio), {}
    for group, (mask, value) in zip(groups, found, strict=True):
        if len(group) == 1:
            kept[group[0]] = mask, value
            continue
        parts = mask.split([math.prod(values[j].shape[1:]) for j in group], dim=1)
        for j, part in zip(group, parts, strict=True):
            keep = part.reshape(values[j].shape)
            kept[j] = keep, cleared(values[j], keep)
    return [kept[i] for i in range(len(values))]


def product_moves(b: Tensor, a: Tensor, whole_b: Tensor, whole_a: Tensor) -> list[Tensor]:
    """How far each change of B `[K, m, r, ...]` and A `[K, r, n, ...]` moves B A: times the norm of what it meets.

    What makes a column of B longer and its row of A shorter changes nothing of it.

    >>> b, a = torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[3.0], [0.0]]])
    >>> product_moves(b, a, 2 * b, a)
    [tensor([[[3., 0.]]]), tensor([[[6.],
             [0.]]])]
    """
    found = []
    for x, other, axis in ((b, whole_a, 2), (a, whole_b.transpose(1, 2), 1)):
        lines = other.double().flatten(2).square()
        norm = total(lines.flatten(0, 1)).sqrt()
        along = [len(lines), *[1] * (axis - 1), x.shape[axis], *[1] * (x.ndim - axis - 1)]
        score = (x.double() * norm.reshape(along)).float()
        found.append(torch.where(score.isfinite(), score, x))
    return found


def over_all(find: Callable[..., Kept], values: list[Tensor], sizes: list[Size], ratio: float) -> Kept:
    """The same over all tensors in one row."""
    whole, widths = torch.cat([flat(x) for x in values], dim=1), [math.prod(x.shape[1:]) for x in values]
    ((mask, kept),) = find([whole], [sum(sizes[1:], sizes[0])], ratio)
    parts = zip(mask.split(widths, dim=1), kept.split(widths, dim=1), values, strict=True)
    return [(keep.reshape(x.shape), value.reshape(x.shape).to(x.dtype)) for keep, value, x in parts]


def say_sparsity(leaves: list[Leaf]) -> None:
    """A debug line for each client: the share of its entries that are not sent."""
    sent = torch.stack([total(leaf.value != 0) for leaf in leaves]).sum(dim=0)
    every = torch.as_tensor(sum(entries_in_scope(leaf) for leaf in leaves), device=sent.device)
    for share in (sent / every.clamp(min=1)).tolist():
        log.debug("Sparsity: %.2f%%", 100 * (1 - share))


def share_of(size_K: Tensor, ratio: float) -> Tensor:
    """max(1, ceil(ratio * P)), and 0 where P = 0. The product is cleared of its last bits: 0.07 * 100 is 7, not 8."""
    k_K = torch.ceil(size_K.double() * ratio * (1 - 2.0**-50)).long()
    return torch.minimum(k_K.clamp(min=1), size_K)


def share_of_number(size: int, ratio: float) -> int:
    """The same of one number.

    >>> share_of_number(100, 0.07), share_of_number(100, 0.071), share_of_number(0, 0.5)
    (7, 8, 0)
    """
    return min(max(math.ceil(size * ratio * (1 - 2.0**-50)), 1), size)


def largest_share(values: list[Tensor], sizes: list[Size], ratio: float) -> Kept:
    counts = [share_of_number(n, ratio) if isinstance(n, int) else share_of(n, ratio) for n in sizes]
    return keep_largest(values, counts)


def above_quantile(values: list[Tensor], sizes: list[Size], ratio: float) -> Kept:
    """|g| >= the (1 - ratio) quantile of the entries in scope, interpolated linearly; zeros never, NaN always."""
    masks = [above_quantile_of(flat(x), size, ratio).view(x.shape) for x, size in zip(values, sizes, strict=True)]
    return [(mask, cleared(x, mask)) for x, mask in zip(values, masks, strict=True)]


def above_quantile_of(values: Tensor, entries: Size, ratio: float) -> Tensor:
    size = values.abs()
    size_K = torch.as_tensor(entries, device=values.device).expand(len(values))
    place = (1 - ratio) * (size_K.double() - 1).clamp(min=0) + (size.shape[1] - size_K)  # out of scope sorts first
    ordered = size.double().sort(dim=1).values
    low = ordered.gather(1, place.floor().long().clamp(max=size.shape[1] - 1)[:, None])
    high = ordered.gather(1, place.ceil().long().clamp(max=size.shape[1] - 1)[:, None])
    cut = low + (high - low) * (place - place.floor())[:, None]
    return ~(size.double() < cut) & (size != 0)
