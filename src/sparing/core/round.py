"""One round: the only functions in which server and clients meet. Every engine calls exactly these.

fold = begin(method, server, ctx)
down = outgoing(method, server, ctx)                        # server, for K clients
up, state = client(method, state, down, train, ctx)         # K clients; `claiming` where some may lie
incoming(method, server, fold, down, up, ctx)               # server, any order and grouping
server, report = settle(method, server, fold, ctx)          # server, once
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.arrived import grown
from sparing.core.compose import downlink, uplink
from sparing.core.download import about
from sparing.core.errors import MethodError, TrainingError, WireError
from sparing.core.fold import Collect, Fold
from sparing.core.keys import Ctx
from sparing.core.later import Doubts, doubt
from sparing.core.learned import learned, overlaid
from sparing.core.parcel import Cut, Cuts, Leaf, Parcel, Schema, cleared, cleared_all, spec_of
from sparing.core.protocols import Arrival, Gradient, Method, Report, Rows, Train, View
from sparing.core.reach import bounds
from sparing.core.roll import sound
from sparing.core.tree import Kept, Layout, Trained, Tree, abreast, column, expand, prefixed, to, under
from sparing.core.versions import first_past, moved_all, served, told

NOTES_UP = {"n": 1, "loss": 1}


class Server(NamedTuple):
    """All that the server remembers between rounds."""

    model: Tree  # leaves [1, *shape]
    share: Tree
    blend: Tree
    fit: Kept
    seen: Tensor  # bool [clients], on the CPU: who has been in a round before
    rows: Rows | None = None  # what is kept of every client
    past: Tree = {}  # noqa: RUF012  versions of the model, where the server broadcasts
    sizes: Tensor | None = None  # the largest magnitude of each tensor of the model, if known

    @property
    def device(self) -> torch.device:
        return next((x.device for x in self.model.values()), torch.device("cpu"))

    def to(self, device: torch.device) -> "Server":
        trees = (self.model, self.share, self.blend, self.fit, self.past)
        model, share, blend, fit, past = (to(part, device) for part in trees)
        return Server(model, share, blend, fit, self.seen.cpu(), self.rows, past)


def first_server(
    method: Method, model: Tree, clients: int, rows: Rows | None = None, gradient: Gradient | None = None
) -> Server:
    refuse_infinite(model, "at the start")
    model = model | {name: x for name, x in method.extra(model).items() if name not in method.share.private}
    blend = prefixed("weigh", method.blend.weigh.init(model, clients))
    for i, step in enumerate(method.blend.steps):
        blend |= prefixed(str(i), step.init(model, clients))
    fit = method.fit.init(model) if method.fit else {}
    seen = torch.zeros(clients, dtype=torch.bool)
    share, past = looked(method, method.share.init(model), model, gradient), first_past(method, model, clients)
    return Server(model, share, blend, fit, seen, rows, past)


def first_row(method: Method, model: Tree) -> Tree:
    """What the server keeps of a client it never met, leaves `[1, ...]`; mostly nothing."""
    return {k: v for i, step in enumerate(method.blend.steps) for k, v in prefixed(str(i), step.row(model)).items()}


def sized(method: Method, ctx: Ctx) -> Method:
    """The method as these K clients see it: share and codecs over the layout of their size."""
    return method.sizes[method.fit.size(ctx)] if method.fit and method.sizes else method


def first_client(method: Method, model: Tree) -> Tree:
    """The state of a client never met, leaves `[1, ...]`: own tensors as initialised, empty memories."""
    device = next(iter(model.values())).device
    whole = model | method.extra(model)
    own = {name: whole[name] for name in sorted(method.share.own)}
    memory = {name: x.to(device) for name, x in uplink(method).init(method.layout).items()}
    local = {name: x.to(device) for name, x in method.local.init(method.layout).items()}
    return prefixed("own", own) | prefixed("up", memory) | prefixed("local", local)


def begin(method: Method, server: Server, ctx: Ctx) -> Fold | Collect:
    """An empty fold for this cohort; its grid depends on the model and the cohort's weights only."""
    total = method.blend.weigh.most(ctx)
    if method.blend.collect is not None:
        return Collect(server.model, total, method.blend.collect)
    plain = any(step.plain for step in method.blend.steps)
    return Fold(server.model, total, ctx.cohort if plain else 0, server.sizes)


def outgoing(method: Method, server: Server, ctx: Ctx) -> Parcel:
    """What the server sends these K clients; shared parts keep one row."""
    model, notes = models_for(method, server, ctx)
    if method.fit is not None:
        model = method.fit.shrink(server.fit, model, method.fit.size(ctx), ctx)
    method = sized(method, ctx)
    cuts = method.share.down(server.share, model, ctx)
    values = cleared_all(model, cuts)
    leaves = {name: Leaf(values[name], scope=cut.mask, told=cut.told) for name, cut in cuts.items()}
    parcel = Parcel(leaves, notes)
    if not method.down:
        return parcel
    return downlink(method).encode(parcel, {}, View(ctx.common, model, model, {}))[0]  # all clients draw alike


def models_for(method: Method, server: Server, ctx: Ctx) -> tuple[Tree, dict[str, Tensor]]:
    """The model, or models, for these K clients, and the numbers that go along."""
    model, notes = server.model, {}
    for i, step in enumerate(method.blend.steps):
        if step.serve is not None:
            rows = Under(str(i), server.rows) if server.rows is not None else None
            model, said = step.serve(under(str(i), server.blend), model, ctx, rows)
            notes |= said
    return model, notes


class Under:
    """One step's part of the rows that the server keeps."""

    def __init__(self, prefix: str, rows: Rows):
        self.prefix, self.rows = prefix, rows

    def read(self, ids: Tensor) -> Tree:
        return under(self.prefix, self.rows.read(ids))

    def write(self, ids: Tensor, rows: Tree) -> None:
        self.rows.write(ids, prefixed(self.prefix, rows))

    def mix(self, ids: Tensor, weight: Tensor) -> Tree:
        return under(self.prefix, self.rows.mix(ids, weight))


def starting_models(method: Method, server: Server, state: Tree, ctx: Ctx) -> Tree:
    """What these K clients would start this round from."""
    got = downlink(sized(method, ctx)).decode(outgoing(method, server, ctx), ctx)
    return overlay(sized(method, ctx).share.given(own_of(method, state, ctx), ctx), got)


def own_of(method: Method, state: Tree, ctx: Ctx) -> Tree:
    """What these K clients keep for themselves, in their size."""
    own = under("own", state)
    if method.fit is None or not method.fit.within:
        return own
    return method.fit.shrink({}, own, method.fit.size(ctx), ctx)


def kept(method: Method, state: Tree, own: Tree, ctx: Ctx) -> Tree:
    """The same in full shape; beyond their size it stays as it was."""
    if method.fit is None or not method.fit.within:
        return own
    full, part = method.fit.grow(own, method.fit.size(ctx), ctx)
    before = under("own", state)
    return {n: x if (mask := part[n]) is None else torch.where(mask, x, before[n]) for n, x in full.items()}


Claim = Callable[[Tree, Trained, Ctx], Trained]
"""(start, after, ctx): what K clients say they have learned, where that is not what they have: simulated attackers."""


def client(method: Method, state: Tree, parcel: Parcel, train: Train, ctx: Ctx) -> tuple[Parcel, Tree]:
    """K clients: take in what came, train, and write down what goes back."""
    up, _, state = claiming(method, state, parcel, train, ctx, lambda start, after, ctx: after)
    return up, state


def claiming(
    method: Method, state: Tree, parcel: Parcel, train: Train, ctx: Ctx, claim: Claim
) -> tuple[Parcel, Parcel, Tree]:
    """The same of clients that may lie: what they send, what they would send in truth, and what they keep.

    They keep what follows from the truth: nobody lies to himself.
    """
    full, method = method, sized(method, ctx)
    got = downlink(method).decode(parcel, ctx)
    start = overlay(method.share.given(own_of(full, state, ctx), ctx), got)
    memory = under("local", state)
    if method.local.reset:
        moving = [name for name in memory if name.startswith("velocity/")]
        memory |= {name: forgotten(memory[name], got.leaves.get(name.rpartition("/")[2])) for name in moving}
    after, local, notes = train(start, memory, ctx)
    cuts = method.share.up(cuts_of(got), ctx)
    notes = {"n": ctx.n.to(torch.float32), "loss": notes["loss"]}

    def written(after: Trained) -> tuple[Parcel, Tree]:
        values = learned(after, got, cuts)
        leaves = {name: Leaf(values[name], scope=cut.mask, told=cut.told) for name, cut in cuts.items()}
        return uplink(method).encode(Parcel(leaves, notes), under("up", state), View(ctx, start, after, got.notes))

    out, memory = written(after)
    said = claim(start, after, ctx)
    up = out if said is after else written(said)[0]
    own = kept(full, state, {name: after[name] for name in method.share.own}, ctx)
    return up, out, prefixed("own", own) | prefixed("up", expand(memory, len(ctx.ids))) | prefixed("local", local)


def put_back(method: Method, state: Tree, parcel: Parcel, gone_K: Tensor, ctx: Ctx) -> Tree:
    """The state of clients whose upload never arrived: they trained, but their memory takes back what they sent."""
    method = sized(method, ctx)
    memory = prefixed("up", uplink(method).lost(parcel, under("up", state), ctx))
    memory |= prefixed("local", method.local.lost(uplink(method).decode(parcel, ctx), under("local", state)))
    state = dict(state)
    for name, x in memory.items():
        state[name] = torch.where(column(gone_K, x), x, state[name])
    return state


def incoming(method: Method, server: Server, fold: Fold | Collect, sent: Parcel, parcel: Parcel, ctx: Ctx) -> None:
    """Validate, decode, compare with the model, and fold in K arrivals."""
    seen_by = sized(method, ctx)
    got = downlink(seen_by).decode(sent, ctx)
    votes = seen_by.share.up(cuts_of(got), ctx)
    arrived = uplink(seen_by).decode(parcel, ctx)
    refuse_strange(arrived, votes, ctx)
    update, scope = grown(method, server.model, got, arrived, votes, ctx)
    arrival = Arrival(update, scope, arrived.notes, server.model, ctx)
    if method.blend.lenient:
        arrival = sound(arrival, fold.grid, fold.roll)
        if not len(arrival.ctx.ids):
            return
    for i, step in enumerate(method.blend.steps):
        if step.receive is not None:
            arrival = step.receive(under(str(i), server.blend), arrival)
    weight_K, said = method.blend.weigh.of(under("weigh", server.blend), arrival)
    if weight_K.shape != arrival.ctx.ids.shape:
        raise MethodError(
            f"the weighting {method.blend.weigh.name!r} gave a tensor of shape {list(weight_K.shape)} for "
            f"{len(arrival.ctx.ids)} clients; it must give one number each"
        )
    seen = prefixed("weigh", said)
    for i, step in enumerate(method.blend.steps):
        seen |= prefixed(str(i), step.watch(under(str(i), server.blend), arrival))
    fold.add(arrival, weight_K, seen, method.blend.weigh.positive)


def settle(
    method: Method, server: Server, fold: Fold | Collect, ctx: Ctx, gradient: Gradient | None = None
) -> tuple[Server, Report]:
    """The cohort is complete: blend, run the server's steps, move the model."""
    report: Report = {"refused": float(fold.roll.refused)} if method.blend.lenient else {}
    if method.blend.lenient and not fold.roll.ids:
        return met(server, ctx), report
    blended = fold.mean(ctx.doubts)
    if method.fit is not None and method.fit.apart is not None:
        blended = method.fit.apart.join(server.fit, server.model, blended)
    hit, size = voted(blended.update, blended.covered, method.layout), max(method.layout.size, 1)
    doubt(ctx.doubts, hit, lambda count: report.update(coverage=float(count) / size))
    mine = blended._replace(seen=under("weigh", blended.seen))
    memory, said = method.blend.weigh.learn(under("weigh", server.blend), mine, ctx)
    state, rows, reports = prefixed("weigh", memory), {}, [said]
    for i, step in enumerate(method.blend.steps):
        mine = blended._replace(seen=under(str(i), blended.seen))
        update, memory, said = step.apply(under(str(i), server.blend), mine, ctx)
        rows |= prefixed(str(i), step.keep(memory, mine, ctx))
        blended = blended._replace(update=update)
        state |= prefixed(str(i), memory)
        reports.append(said)
    server = met(server, ctx)
    past = server.past
    if method.broadcast is not None:
        blended, past, said = told(method, server.model, past, blended, ctx)
        reports.append(said)
    model = moved_all(server.model, blended.update, blended.covered)
    sizes = refuse_infinite(model, f"after round {ctx.round}", ctx.doubts)
    share, said = method.share.learn(server.share, blended, ctx)
    share = looked(method, share, model, gradient)
    reports.append(said)
    fit = server.fit
    if method.fit is not None:
        fit, said = method.fit.learn(fit, model, ctx)
        reports.append(said)
    if rows and server.rows is not None:
        server.rows.write(blended.ids, rows)
    complete(report, reports, ctx.doubts)
    return Server(model, share, state, fit, server.seen, server.rows, past, sizes), report


def complete(report: Report, parts: list[Report], doubts: Doubts | None) -> None:
    """Put in what all parts have to say, once those that wait for numbers from a device have them."""

    def judge(_: Tensor) -> None:
        for part in parts:
            report.update(part)

    doubt(doubts, torch.zeros(0), judge)


def met(server: Server, ctx: Ctx) -> Server:
    """After these clients were served, whether or not anything came back."""
    seen = server.seen.index_fill(0, ctx.here[0], True)
    return server._replace(seen=seen, past=served(server.past, ctx))


def looked(method: Method, share: Tree, model: Tree, gradient: Gradient | None) -> Tree:
    """The share's state for this model, once it has seen a gradient there, where the method asks for one."""
    if not method.probe:
        return share
    if gradient is None:
        raise MethodError("the method scores positions on a probe set, and the server has none; give it a gradient")
    return method.share.look(share, gradient(model))


def schema_down(method: Method, initial: Tree, ctx: Ctx) -> Schema:
    """What one client (K = 1) expects, built from the initial model and ctx alone."""
    notes = {name: size for step in method.blend.steps for name, size in step.notes.items()}
    method = sized(method, ctx)
    cuts = method.share.down(method.share.init(initial), initial, ctx)
    return downlink(method).schema(plain_schema(method.layout, cuts, notes, f"{about(ctx)}/down"), ctx)


def schema_up(method: Method, sent: Parcel, ctx: Ctx) -> Schema:
    """What the server expects back from one client (K = 1) to which it sent this parcel."""
    method = sized(method, ctx)
    cuts = method.share.up(cuts_of(downlink(method).decode(sent, ctx)), ctx)
    return uplink(method).schema(plain_schema(method.layout, cuts, NOTES_UP, f"{about(ctx)}/up"), ctx)


def plain_schema(layout: Layout, cuts: Cuts, notes: dict[str, int], about: str) -> Schema:
    leaves = {name: spec_of(layout.shapes[name], layout.dtypes[name], cut) for name, cut in cuts.items()}
    return Schema(leaves, notes, about)


def cuts_of(parcel: Parcel) -> Cuts:
    return {name: Cut(leaf.scope, leaf.told) for name, leaf in parcel.leaves.items()}


def overlay(own: Tree, got: Parcel) -> Tree:
    """A client's model: what came, written over its own copy."""
    start = dict(own)
    parts = {name: (own[name], leaf.value, leaf.scope) for name, leaf in got.leaves.items() if leaf.scope is not None}
    start |= {name: leaf.value for name, leaf in got.leaves.items() if name not in parts}
    return start | overlaid(parts)


def forgotten(memory: Tensor, written: Leaf | None) -> Tensor:
    """Zero where the server has just written."""
    if written is None:
        return memory
    return torch.zeros_like(memory) if written.scope is None else cleared(memory, ~written.scope)


def refuse_strange(arrived: Parcel, votes: Cuts, ctx: Ctx) -> None:
    """A decoded parcel must hold exactly the tensors it was asked for, and sensible notes."""
    if arrived.leaves.keys() != votes.keys():
        odd = min(arrived.leaves.keys() ^ votes.keys())
        raise WireError(f"round {ctx.round}: parcels and method disagree about {odd!r}; use one config on both ends")

    def judge(n_K: Tensor) -> None:
        if not len(n_K) or float(n_K.min()) >= 1:
            return
        for k in (~(n_K >= 1)).nonzero()[:, 0].tolist():
            who, n = int(ctx.here[0][k]), float(n_K[k])
            raise WireError(f"round {ctx.round}: client {who} reported {n:g} samples; it must have at least one")

    doubt(ctx.doubts, arrived.notes["n"], judge)


def refuse_infinite(model: Tree, when: str, doubts: Doubts | None = None) -> Tensor:
    """The largest magnitude of each tensor."""

    def judge(sizes: Tensor) -> None:
        for name in (name for name, size in zip(model, sizes.tolist(), strict=True) if not math.isfinite(size)):
            raise TrainingError(f"layer {name!r} of the server's model is not finite {when}; lower the learning rates")

    doubt(doubts, sizes := bounds(model), judge)
    return sizes


def voted(update: Tree, covered: dict[str, Tensor | None], layout: Layout) -> Tensor:
    """How many of the parameters somebody voted on."""
    masks = {name: covered[name] for name in layout.params if name in update}
    hit = sum(update[name].numel() for name, mask in masks.items() if mask is None)
    some = [mask for mask in masks.values() if mask is not None]
    return abreast(some).sum() + hit if some else torch.tensor(hit)
