"""Parcels: what crosses the wire for K clients at once, and the schema a receiver expects.

A `Leaf` is one tensor of a parcel. Two kinds of boolean say which of its values are sent:

* `scope`: the receiver can rebuild it, so it costs no bytes (unless `told`, when the sender chose it from data and
  its index travels).
* `keep`: chosen from the data, so its index is paid for. Several masks are ANDed, each broadcasts against the value,
  and its broadcast shape is the grain of its index: filters `[K, F, 1, 1, 1]` cost F bits.

Who votes on a coordinate is the share's business: what it lets through but a codec leaves out is a zero update.

Values are zero wherever they are not sent, so a parcel has one form only and `from_bytes(to_bytes(p)) == p`.

    >>> leaf = Leaf(torch.tensor([[0.0, 2.0]]), keep=(torch.tensor([[False, True]]),))
    >>> sent_mask(leaf)
    tensor([[False,  True]])
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Leaf(NamedTuple):
    """One tensor of K parcels.

    `value` is float (sent at its own width), int64 (sent raw), or int8 codes of `bits` bits: for b >= 2 bits the codes
    lie in [-2^(b-1), 2^(b-1) - 1], for one bit they are -1 and +1 (zero where they are not sent). `scale` holds a few
    float32 per client, `[K, s]`, whose meaning the codec knows; they travel and are counted.
    """

    value: Tensor  # [K, *shape]
    scope: Tensor | None = None  # bool, [K or 1, *shape] or broadcastable to it; None: everywhere
    keep: tuple[Tensor, ...] = ()  # bool, each broadcastable to value
    scale: Tensor | None = None  # float32 [K, s]
    bits: int | Tensor = 32  # of packed codes, 1 to 8: one number or one per client [K]; else ignored
    told: bool = False  # the scope's index travels
    tight: bool = False  # masks and codes in as few bytes as any of our codes takes, at the price of trying them


class Parcel(NamedTuple):
    leaves: dict[str, Leaf]
    notes: dict[str, Tensor]  # float32 [K] or [K, m]: a few scalars per client, counted like everything else


class Spec(NamedTuple):
    """What a receiver knows of one leaf before the bytes arrive (K = 1).

    It must fit what the encoder gives. The bits of codes travel with them: a quantiser sets `dtype` and `scales` only.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32  # of the leaf's value: torch.int8 for codes
    scope: Tensor | None = None  # bool [1, *shape]; unknown (and ignored) where told
    told: bool = False
    grains: tuple[tuple[int, ...], ...] = ()  # the shape of each keep mask, without the client axis
    scales: int = 0  # s, where the leaf's scale is [K, s]
    tight: bool = False
    most: int | None = None  # values sent at most, where that is less than what is in scope
    bits: int = 8  # of codes, at most


class Limit(NamedTuple):
    """What leaves hold together, at most."""

    names: frozenset[str]
    shared: int  # values in scope
    sent: int  # values sent


class Schema(NamedTuple):
    """What a receiver knows of a parcel. How large it can be follows from it: `wire.bound.most_bytes`."""

    leaves: dict[str, Spec]
    notes: dict[str, int]  # name -> scalars per client
    about: str = ""  # hashed into the header: seed, round, client, direction
    limit: Limit | None = None
    most: float = math.inf  # bytes that codecs keep to, unless a parcel that says nothing takes more


class Cut(NamedTuple):
    """The part of one tensor that is shared: `mask` None means all of it; `told` means the index must travel."""

    mask: Tensor | None = None  # bool [K or 1, *shape]
    told: bool = False


Cuts = dict[str, Cut]  # a name that is absent is not shared


def sent_mask(leaf: Leaf) -> Tensor | None:
    """Where values are really sent, broadcastable to the value; None: everywhere."""
    mask = leaf.scope
    for keep in leaf.keep:
        mask = keep if mask is None else mask & keep
    return mask


def both_masks(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """AND of two masks where None means everywhere."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def intersect_cuts(a: Cuts, b: Cuts) -> Cuts:
    """The part that both shares share."""
    return {name: Cut(both_masks(a[name].mask, b[name].mask), a[name].told or b[name].told) for name in a if name in b}


def spec_of_cut(shape: tuple[int, ...], dtype: torch.dtype, cut: Cut) -> Spec:
    return Spec(shape, dtype, None if cut.told else cut.mask, cut.told)


def map_tensors(parcel: Parcel, change: Callable[[Tensor], Tensor]) -> Parcel:
    """The parcel with every tensor in it changed."""
    leaves = {}
    for name, leaf in parcel.leaves.items():
        leaves[name] = Leaf(
            change(leaf.value),
            None if leaf.scope is None else change(leaf.scope),
            tuple(change(keep) for keep in leaf.keep),
            None if leaf.scale is None else change(leaf.scale),
            change(leaf.bits) if isinstance(leaf.bits, Tensor) else leaf.bits,
            leaf.told,
            leaf.tight,
        )
    return Parcel(leaves, {name: change(x) for name, x in parcel.notes.items()})


def pick_clients(parcel: Parcel, index: Tensor | slice) -> Parcel:
    """Some clients' parcels; what is shared by all stays shared."""
    return map_tensors(parcel, lambda x: x if x.shape[0] == 1 else x[index])


def parcel_row(parcel: Parcel, k: int) -> Parcel:
    """Client k's parcel alone (K = 1)."""
    return pick_clients(parcel, slice(k, k + 1))


def client_count(parcel: Parcel) -> int:
    """K: the largest client axis in the parcel."""
    axes = [x.shape[0] for x in parcel.notes.values()]
    for leaf in parcel.leaves.values():
        axes.append(leaf.value.shape[0])
        axes += [x.shape[0] for x in (leaf.scope, leaf.scale, leaf.bits, *leaf.keep) if isinstance(x, Tensor)]
    return max(axes, default=1)
