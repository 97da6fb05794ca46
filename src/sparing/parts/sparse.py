"""Sparsifiers: top-k (positions depend on the data, so their index is paid for) and random-k (keyed, so it is free).

Only parameters are thinned out; buffers pass whole.
"""

import logging
import math

import torch
from torch import Tensor

from sparing.core.errors import ConfigError, check_range
from sparing.core.gpu import brought, ready
from sparing.core.keys import Ctx, hashes
from sparing.core.parcel import Leaf, Parcel, Schema, both, cleared
from sparing.core.product import formed
from sparing.core.protocols import Codec, View
from sparing.core.reduce import kept_of_each, total
from sparing.core.tree import Layout, Tree, abreast, column, flat

log = logging.getLogger("sparing")


def topk(layout: Layout, ratio: float, mode: str = "exact", over: str = "layer") -> Codec:
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
    pick = largest_share if mode == "exact" else above_quantile

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        chosen = {name: leaf for name, leaf in parcel.leaves.items() if name in params}
        leaves = dict(parcel.leaves)
        for names in groups(chosen, over):
            some = [chosen[name] for name in names]
            values, widths = abreast(formed([x.value for x in some])), [math.prod(x.value.shape[1:]) for x in some]
            stretches = (sum(widths),) if over == "model" else tuple(widths)
            if mode == "exact" and all(leaf.scope is None for leaf in some):
                k = brought(tuple(share_of_number(n, ratio) for n in stretches), values.device)
                mask, sent = kept_of_each(values, stretches, k.expand(len(values), -1))
            else:
                size = entries(some)
                size = size.sum(dim=1, keepdim=True) if over == "model" else size
                mask, sent = pick(values, stretches, size, ratio)
            sent = zip(sent.split(widths, dim=1), mask.split(widths, dim=1), strict=True)
            for name, leaf, (value, keep) in zip(names, some, sent, strict=True):
                value, keep = value.reshape(leaf.value.shape).to(leaf.value.dtype), keep.reshape(leaf.value.shape)
                leaves[name] = leaf._replace(value=value, keep=(*leaf.keep, keep))
        if chosen and log.isEnabledFor(logging.DEBUG):
            say_sparsity([leaves[name] for name in chosen])
        return Parcel(leaves, parcel.notes), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = {
            name: spec._replace(grains=(*spec.grains, spec.shape)) if name in params else spec
            for name, spec in expected.leaves.items()
        }
        return expected._replace(leaves=leaves)

    traits = frozenset({"sparse", "ranks"} if over == "model" else {"sparse"})
    return Codec(encode, schema=schema, name="topk", lossy=True, traits=traits)


def randk(layout: Layout, ratio: float, unbiased: bool = False) -> Codec:
    """Keep max(1, ceil(ratio * P)) entries drawn from (seed, round, client); `unbiased` scales them by P / k."""
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
            leaves[name] = leaf._replace(value=cleared(value, mask), scope=both(leaf.scope, mask), keep=keep)
        return Parcel(leaves, parcel.notes), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves = dict(expected.leaves)
        for name in params & leaves.keys():
            spec = leaves[name]
            leaves[name] = spec._replace(scope=both(spec.scope, drawn(name, spec.shape, spec.scope, ctx)[0]))
        return expected._replace(leaves=leaves)

    def drawn(name: str, shape: tuple[int, ...], scope: Tensor | None, ctx: Ctx) -> tuple[Tensor, Tensor]:
        """The mask `[K, *shape]` within scope, and P / k for every client."""
        size = math.prod(shape)
        words = hashes(ctx.keys(f"randk/{name}"), size)
        if scope is not None:
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

    traits = frozenset({"sparse", "unbiased"} if unbiased else {"sparse"})
    return Codec(encode, schema=schema, name="randk", lossy=True, traits=traits)


def groups(leaves: dict[str, Leaf], over: str) -> list[list[str]]:
    """Which leaves are looked at side by side: on a GPU all of them, since there every operation costs."""
    alike = len({(leaf.value.dtype, leaf.value.shape[0]) for leaf in leaves.values()}) == 1
    together = alike and all(ready(leaf.value) for leaf in leaves.values())
    return [list(leaves)] if leaves and (together or over == "model") else [[name] for name in leaves]


def entries(leaves: list[Leaf]) -> Tensor:
    """P: how many entries of each leaf are in scope, `[K or 1, S]` int64."""
    device, sizes = leaves[0].value.device, tuple(math.prod(leaf.value.shape[1:]) for leaf in leaves)
    if all(leaf.scope is None for leaf in leaves):
        return brought(sizes, device)[None]
    k = leaves[0].value.shape[0]
    counts = [
        torch.full((k,), n, device=device)
        if leaf.scope is None
        else flat(leaf.scope.expand(-1, *leaf.value.shape[1:])).sum(dim=1).expand(k)
        for leaf, n in zip(leaves, sizes, strict=True)
    ]
    return torch.stack(counts, dim=1)


def say_sparsity(leaves: list[Leaf]) -> None:
    """A debug line for each client: the share of its entries that are not sent."""
    sent = torch.stack([total(leaf.value != 0) for leaf in leaves]).sum(dim=0)
    every = entries(leaves).sum(dim=1)
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


Kept = tuple[Tensor, Tensor]
"""Which entries are sent, and these, with zeros for the others."""


def largest_share(values: Tensor, stretches: tuple[int, ...], size: Tensor, ratio: float) -> Kept:
    return kept_of_each(values, stretches, share_of(size, ratio).expand(len(values), -1))


def above_quantile(values: Tensor, stretches: tuple[int, ...], size: Tensor, ratio: float) -> Kept:
    """|g| >= the (1 - ratio) quantile of the entries in scope, interpolated linearly; zeros never, NaN always."""
    parts = zip(values.split(stretches, dim=1), size.unbind(1), strict=True)
    mask = torch.cat([above_quantile_of(part, size_K, ratio) for part, size_K in parts], dim=1)
    return mask, cleared(values, mask)


def above_quantile_of(values: Tensor, size_K: Tensor, ratio: float) -> Tensor:
    size = values.abs()
    size_K = size_K.expand(len(values))
    place = (1 - ratio) * (size_K.double() - 1).clamp(min=0) + (size.shape[1] - size_K)  # out of scope sorts first
    ordered = size.double().sort(dim=1).values
    low = ordered.gather(1, place.floor().long().clamp(max=size.shape[1] - 1)[:, None])
    high = ordered.gather(1, place.ceil().long().clamp(max=size.shape[1] - 1)[:, None])
    cut = low + (high - low) * (place - place.floor())[:, None]
    return ~(size.double() < cut) & (size != 0)
