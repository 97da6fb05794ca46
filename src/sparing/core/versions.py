"""Versions of the model: what a broadcasting server remembers, so that a download is only what a client misses.

Such a server writes its update once a round, for everyone, and moves its model by what those bytes say. Whoever was
served in a round holds, bit for bit, the model that the server had then. So nothing is kept of a client but the round
in which it was last served; beside that there are the bytes of the last updates and the model before them, the base.

    a download    the updates that a client misses, one parcel each, and one with its notes; or the whole model,
                  whichever is shorter
    the base      moves on once the updates after it are together no shorter than the model: nobody would be sent
                  all of them, and the server never keeps more than about two models

Where a broadcast is `over` some tensors only, the model above is those: a download has the others beside the updates
or the whole. What the blended update has beside the model is written then, and the codec reads changes of them in it.

As a Tree: `held` [clients], the round each was last served in; `from`, the first round from which somebody can be
brought up to date; `frame/ROUND` and `size/ROUND` of every update, `base/NAME` where there is one; and `memory/...`,
what updates could not say yet. The last two lie where the model does, the others on the host.
"""

import torch
from torch import Tensor

from sparing.core.compose import broadcaster
from sparing.core.context import Ctx
from sparing.core.method import Blended, Method, Report, View
from sparing.core.operation import operation
from sparing.core.ops import move_tensor
from sparing.core.parcel import Leaf, Parcel, Schema, Spec, map_tensors
from sparing.core.tree import Tree, prefixed, under
from sparing.wire import from_bytes, nbytes, parcel_sizes, written_parcel

NEVER = -1


def commonly_held(method: Method) -> list[str]:
    """The tensors that every client holds as the server does; none where clients get parts or models of their own."""
    share = method.share
    alone = any(step.serving is not None and not step.serving.notes for step in method.blend.steps)
    if method.broadcast is not None and method.broadcast.over is not None:
        return [name for name in method.layout.shapes if name in method.broadcast.over - share.private]
    if method.broadcast is None or method.fit is not None or share.own != share.private or alone:
        return []
    return [name for name in method.layout.shapes if name not in share.private]


def first_held(method: Method) -> int:
    """The round whose model a client never met holds: round 1 begins with the first model."""
    return 1 if method.broadcast is not None and method.broadcast.seeded else NEVER


def first_past(method: Method, model: Tree, clients: int) -> Tree:
    """What a server that broadcasts remembers before the first round; nothing, for others."""
    if method.broadcast is None:
        return {}
    device = next(iter(model.values())).device
    past = {f"memory/{name}": x.to(device) for name, x in broadcaster(method).init(method.layout).items()}
    if commonly_held(method):
        past["held"] = torch.full((clients,), first_held(method), dtype=torch.int64)
        past["from"] = torch.zeros(1, dtype=torch.int64)
    return past


def past_to(past: Tree, device: torch.device) -> Tree:
    """With what belongs to the model on its device, and the rest on the host."""
    there = {name for name in past if name.partition("/")[0] in ("memory", "base")}
    return {name: x.to(device) if name in there else x.cpu() for name, x in past.items()}


def mark_served(past: Tree, ctx: Ctx) -> Tree:
    """These clients now hold the model that this round began with."""
    if "held" not in past:
        return past
    return past | {"held": past["held"].index_fill(0, ctx.ids, ctx.round)}


# ------------------------------------------------------------------------------------------------ the server's update


def broadcast_update(
    method: Method, model: Tree, past: Tree, blended: Blended, ctx: Ctx
) -> tuple[Blended, Tree, Report]:
    """The blended update as everyone will read it, and what is remembered of it."""
    if method.broadcast is not None and method.broadcast.over is not None:
        return _broadcast_over_some(method, model, past, blended, ctx)
    layout, codec, here = method.layout, broadcaster(method), everyone_at(ctx, ctx.round)
    covered = {name: None if mask is None or bool(mask.all()) else mask for name, mask in blended.covered.items()}
    common = commonly_held(method)
    whole = bool(common) and all(covered.get(name) is None for name in common)
    update = ({name: torch.zeros_like(model[name]).double() for name in common} if whole else {}) | blended.update
    names = [name for name in layout.floats if name in update and name not in method.share.values]
    leaves = {name: Leaf(update[name].to(layout.dtypes[name]), scope=covered.get(name)) for name in names}
    if whole:
        leaves |= {name: Leaf(move_tensor(model[name], update[name])) for name in common if name in layout.buffers}
    parcel, memory = codec.encode(Parcel(leaves, {}), under("memory", past), View(here, {}, {}, {}))
    past = past | prefixed("memory", memory)
    if whole:
        data, spent = written_parcel(parcel, 0, frame_about(ctx))
        sizes = {kind: torch.tensor([size]) for kind, size in spent.items()}
        past = _with_update(method, model, past, data, sizes, ctx)
        parcel = read_back(parcel, data, frame_schema(method, here), here)
    else:
        past, sizes = _without_updates(past, ctx.round) if common else past, parcel_sizes(parcel)
    decoded = codec.decode(parcel, here)
    update = update | {name: decoded.leaves[name].value.double() for name in names}
    return blended._replace(update=update, covered=covered), past, {"broadcast_bytes": float(sum(sizes.values()))}


def _broadcast_over_some(
    method: Method, model: Tree, past: Tree, blended: Blended, ctx: Ctx
) -> tuple[Blended, Tree, Report]:
    """What the update has beside the model is written, and read as an update of the tensors held alike."""
    codec, here = broadcaster(method), everyone_at(ctx, ctx.round)
    common = {name: model[name] for name in commonly_held(method)}
    beside = {name: Leaf(x) for name, x in blended.update.items() if name not in model}
    update = {name: x for name, x in blended.update.items() if name in model}
    if not beside or not common:
        return blended._replace(update=update), past, {"broadcast_bytes": 0.0}
    parcel, _ = codec.encode(Parcel(beside, {}), {}, View(here, common, {}, {}))
    data, spent = written_parcel(parcel, 0, frame_about(ctx))
    past = _with_update(method, model, past, data, {kind: torch.tensor([size]) for kind, size in spent.items()}, ctx)
    decoded = codec.decode(read_back(parcel, data, frame_schema(method, here), here), here)
    update |= {name: leaf.value.double() for name, leaf in decoded.leaves.items()}
    return blended._replace(update=update), past, {"broadcast_bytes": float(len(data))}


def _with_update(method: Method, model: Tree, past: Tree, data: bytes, sizes: dict[str, Tensor], ctx: Ctx) -> Tree:
    """With one more update, its bytes by kind; those that nobody would be sent any more are merged into the base."""
    base = under("base", past) or {name: model[name] for name in commonly_held(method)}
    past = past | {f"frame/{ctx.round}": torch.frombuffer(bytearray(data), dtype=torch.uint8)}
    past[f"size/{ctx.round}"] = torch.cat(list(sizes.values()))
    serving = [step.serving for step in method.blend.steps if step.serving is not None]
    notes = {name: torch.zeros(1, n) for one in serving for name, n in one.notes.items()}
    most = int(nbytes(Parcel({name: Leaf(model[name]) for name in base}, notes))[0])
    rounds, lengths = update_table(past)
    least = lengths.sum(1) + int(nbytes(Parcel({}, notes))[0])
    gone = rounds[: int((least[:-1] >= most).sum())]  # lengths fall from first to last
    if len(gone) == len(rounds):
        return _without_updates(past, ctx.round)
    for t in gone:
        base = apply_update_bytes(method, base, past[f"frame/{t}"], everyone_at(ctx, t))
    return (_without_updates(past, gone[-1]) if gone else past) | prefixed("base", base)


def _without_updates(past: Tree, last: int) -> Tree:
    """No update up to that of round `last`, and no base."""

    def stays(name: str) -> bool:
        kind, _, t = name.partition("/")
        return kind != "base" and (kind not in ("frame", "size") or int(t) > last)

    return {name: x for name, x in past.items() if stays(name)} | {"from": torch.full_like(past["from"], last + 1)}


def update_table(past: Tree) -> tuple[list[int], Tensor]:
    """The rounds whose updates are there, and the bytes by kind of all from each on, `[rounds + 1, kinds]`."""
    rounds = sorted(map(int, under("frame", past)))
    rows = [past[f"size/{t}"] for t in rounds] + [torch.zeros(5, dtype=torch.int64)]
    return rounds, torch.stack(rows).flip(0).cumsum(0).flip(0)


def apply_update_bytes(method: Method, copy: Tree, data: Tensor | bytes, here: Ctx) -> Tree:
    """A copy of the model after the update in these bytes: the same operations as on the server."""
    got = _read_update(method, data, frame_schema(method, here), here).leaves
    as_values = method.layout.buffers if method.broadcast is not None and method.broadcast.over is None else ()
    return {
        name: got[name].value if name in as_values else move_tensor(x, got[name].value.double())
        for name, x in copy.items()
    }


def _read_update(method: Method, data: Tensor | bytes | memoryview, schema: Schema, here: Ctx) -> Parcel:
    raw = data.numpy().tobytes() if isinstance(data, Tensor) else data
    return broadcaster(method).decode(_read_parcel(raw, schema, here), here)


@operation
def read_back(parcel: Parcel, data: bytes, schema: Schema, here: Ctx) -> Parcel:
    """What the bytes say that this parcel was written in: the same parcel."""
    return _read_parcel(data, schema, here)


def _read_parcel(data: bytes | memoryview, schema: Schema, here: Ctx) -> Parcel:
    return map_tensors(from_bytes(data, schema), lambda x: x.to(here.device))


def frame_schema(method: Method, here: Ctx) -> Schema:
    """What everyone expects of the update of this round."""
    names = commonly_held(method)
    names = [name for name in method.layout.floats if name in names] + [n for n in names if n in method.layout.buffers]
    leaves = {name: Spec(method.layout.shapes[name], method.layout.dtypes[name]) for name in names}
    return broadcaster(method).schema(Schema(leaves, {}, frame_about(here)), here)


def frame_about(ctx: Ctx) -> str:
    return f"{ctx.seed}/{ctx.round}/all/update"


def everyone_at(ctx: Ctx, t: int) -> Ctx:
    """What everyone knows of round t, whoever took part in it."""
    return ctx.common._replace(round=t, cohort=1)


def copy_of(method: Method, model: Tree, past: Tree, held: int, ctx: Ctx) -> Tree:
    """The model as clients last served in round `held` hold it; empty if that is too long ago."""
    if "held" not in past or held < int(past["from"]):
        return {}
    copy = under("base", past) or {name: model[name] for name in commonly_held(method)}
    for t in update_table(past)[0]:
        if t < held:
            copy = apply_update_bytes(method, copy, past[f"frame/{t}"], everyone_at(ctx, t))
    return copy
