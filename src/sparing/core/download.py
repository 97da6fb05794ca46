"""A client's download where the server broadcasts: both ends. `docs/wire.md` says how it is laid out.

The updates that a client misses, one parcel each, and a last one with its notes; or the whole model in one parcel,
whichever is shorter. What the broadcast is not of, where it is over some tensors only, goes in the last parcel. Where
the server does not broadcast, a download is what `round.outgoing` gives.
"""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import WireError
from sparing.core.method import Method
from sparing.core.parcel import Leaf, Parcel, Schema, map_tensors
from sparing.core.tree import Tree
from sparing.core.versions import apply_update_bytes, commonly_held, everyone_at, frame_schema, update_table
from sparing.wire import (
    Later,
    fingerprint,
    from_bytes,
    hash_in,
    is_plain,
    parcel_sizes,
    sizes_later,
    split_parcels,
    to_bytes,
)
from sparing.wire.count import leaf_sizes
from sparing.wire.section import CODES


def download_kinds(method: Method, past: Tree, down: Parcel, ctx: Ctx) -> tuple[Tensor, dict[str, Tensor]]:
    """Who of these K clients is sent updates instead of `down`, and what everyone's download takes, by kind."""
    whole = {kind: x.cpu() for kind, x in parcel_sizes(down).items()}
    if not is_whole_model(method, past, down):
        return torch.zeros(len(ctx.ids), dtype=torch.bool), whole
    held_K = past["held"][ctx.ids]
    rounds, lengths = update_table(past)
    first_K = torch.searchsorted(torch.tensor(rounds, dtype=torch.int64), held_K)
    last = parcel_sizes(_last_parcel(method, down))
    own = torch.stack([x.cpu().expand(len(held_K)) for x in last.values()], dim=1)
    less = dict(zip(whole, (lengths[first_K] + own).unbind(1), strict=True))
    behind_K = (held_K >= past["from"]) & (sum(less.values()) < sum(whole.values()))
    return behind_K, {kind: torch.where(behind_K, less[kind], whole[kind]) for kind in whole}


def downloads_later(method: Method, past: Tree, down: Parcel, ctx: Ctx) -> Later:
    """What everyone's download takes; where the server does not broadcast, a device is waited for when it is called."""
    if not is_whole_model(method, past, down):
        return sizes_in_round(down, ctx)
    found = download_kinds(method, past, down, ctx)[1]
    return lambda: found


def sizes_in_round(parcel: Parcel, ctx: Ctx) -> Later:
    """`wire.sizes_later`; leaves that are cut by the share alone, perhaps both ways alike, are counted once a round."""
    leaves = parcel.leaves
    if is_plain(parcel) or any(x.keep or x.told or x.tight or x.value.dtype == CODES for x in leaves.values()):
        return sizes_later(parcel)
    alike = tuple((x.scope, x.value.shape[1:], x.value.dtype) for x in leaves.values())
    return sizes_later(parcel, ctx.once(("sizes", alike), lambda: leaf_sizes(leaves)))


def is_whole_model(method: Method, past: Tree, down: Parcel) -> bool:
    """Whether everyone gets the same whole model in this download: all of what is held alike."""
    if "held" not in past:
        return False
    common = [down.leaves.get(name) for name in commonly_held(method)]
    return all(leaf is not None and leaf.scope is None and leaf.value.shape[0] == 1 for leaf in common)


def _last_parcel(method: Method, down: Parcel) -> Parcel:
    """What goes down beside updates."""
    common = set(commonly_held(method))
    return down._replace(leaves={name: leaf for name, leaf in down.leaves.items() if name not in common})


def write_download(method: Method, past: Tree, down: Parcel, ctx: Ctx) -> bytes:
    """One client's download (K = 1): the updates it misses and a last parcel, or `down` as it is."""
    if not bool(download_kinds(method, past, down, ctx)[0][0]):
        return to_bytes(down, 0, f"{parcel_about(ctx)}/down")
    held = int(past["held"][int(ctx.ids[0])])
    missed = [t for t in update_table(past)[0] if t >= held]
    parts = [past[f"frame/{t}"].numpy().tobytes() for t in missed]
    return b"".join((*parts, to_bytes(_last_parcel(method, down), 0, _closing(ctx, held, missed))))


def read_download(
    method: Method, data: bytes, whole: Schema, copy: Tree, held: int, ctx: Ctx
) -> tuple[Parcel, list[Schema]]:
    """What `write_download` stood for, read by a client (K = 1) that was last served in round `held`.

    It holds `copy` since then, nothing if that is too long ago, and expects the schema `whole` where the whole model
    comes. Also gives what it expected of each parcel.
    """
    *updates, last = split_parcels(data, ctx.round - max(held, 0) + 1)
    device = ctx.device
    if not copy or (not updates and hash_in(last) == fingerprint(whole)):
        return map_tensors(from_bytes(data, whole), lambda x: x.to(device)), [whole]
    schemas, rounds, t = [], [], held
    for part in updates:
        t, schema = _next_update(method, hash_in(part), t, ctx)
        copy = apply_update_bytes(method, copy, bytes(part), everyone_at(ctx, t))
        schemas, rounds, t = [*schemas, schema], [*rounds, t], t + 1
    beside = {name: spec for name, spec in whole.leaves.items() if name not in copy}
    own = Schema(beside, whole.notes, _closing(ctx, held, rounds))
    rest = map_tensors(from_bytes(last, own), lambda x: x.to(device))
    leaves = {name: Leaf(copy[name]) if name in copy else rest.leaves[name] for name in whole.leaves}
    return Parcel(leaves, rest.notes), [*schemas, own]


def _next_update(method: Method, seen: bytes, t: int, ctx: Ctx) -> tuple[int, Schema]:
    """The round, from t on, whose update has this hash. There may be rounds in which the model did not move."""
    for later in range(t, ctx.round):
        schema = frame_schema(method, everyone_at(ctx, later))
        if fingerprint(schema) == seen:
            return later, schema
    raise WireError(
        f"schema hash {seen.hex()} is that of no update from round {t} to {ctx.round - 1}; the two sides differ in "
        "method or in what this client holds: start both from the same config, or ask for the whole model"
    )


def _closing(ctx: Ctx, held: int, rounds: list[int]) -> str:
    """Binds a client's last parcel to the updates before it: none can be left out."""
    return f"{parcel_about(ctx)}/down/{','.join(map(str, (held, *rounds)))}"


def parcel_about(ctx: Ctx) -> str:
    """Bound into the header, so that a parcel of another seed, round or client is refused."""
    return f"{ctx.seed}/{ctx.round}/{int(ctx.ids[0])}"
