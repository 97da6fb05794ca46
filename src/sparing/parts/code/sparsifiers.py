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

log = logging.getLogger("sparing")


def topk_codec(layout: Layout, ratio: float, mode: str = "exact", over: str = "layer") -> Codec:
    """Keep the max(1, ceil(ratio * P)) largest of the P shared entries, per layer or over the whole model.

    `mode="quantile"` keeps |g| >= quantile(|g|, 1 - ratio) instead, as some implementations do. Zeros are never sent.
    """
    check_range("topk.ratio", ratio, 0, 1, open_low=True)
    if mode not in ("exact", "quantile"):
        raise ConfigError(f"topk.mode is {mode!r}; use 'exact' or 'quantile'")
    if over not in ("layer", "model"):
        raise ConfigError(f"topk.over is {over!r}; use 'layer' or 'model'")
    if ratio == 1:
        return Codec(encode=lambda parcel, state, view: (parcel, state), name="topk")
    params = frozenset(layout.params)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        chosen = {name: leaf for name, leaf in parcel.leaves.items() if name in params}
        values = [leaf.value for leaf in chosen.values()]
        sizes = [entries_in_scope(leaf) for leaf in chosen.values()]
        find = largest_share if mode == "exact" else above_quantile
        found = find(values, sizes, ratio) if over == "layer" or not chosen else over_all(find, values, sizes, ratio)
        leaves = dict(parcel.leaves)
        for (name, leaf), (keep, value) in zip(chosen.items(), found, strict=True):
            leaves[name] = leaf._replace(value=value, keep=(*leaf.keep, keep))
        if chosen and log.isEnabledFor(logging.DEBUG):
            say_sparsity([leaves[name] for name in chosen])
        return Parcel(leaves, parcel.notes), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = dict(expected.leaves)
        for name in params & leaves.keys():
            spec = leaves[name]
            most = share_of_number(math.prod(spec.shape), ratio) if mode == "exact" and over == "layer" else spec.most
            leaves[name] = spec._replace(grains=(*spec.grains, spec.shape), most=most)
        return expected._replace(leaves=leaves, limit=limited(expected))

    def limited(expected: Schema) -> Limit | None:
        """What is sent of all layers; a quantile sends all that are equal to it."""
        limit, names = expected.limit, params & expected.leaves.keys()
        if mode == "quantile" or (limit is None and over == "layer"):
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
