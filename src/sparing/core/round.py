"""One round: the only functions in which server and clients meet. Every engine calls exactly these.

fold = begin(method, server, ctx)
down = outgoing(method, server, ctx)                        # server, for K clients
up, state = client(method, state, down, train, ctx)         # K clients; `claiming` where some may lie
incoming(method, server, fold, down, up, ctx)               # server, any order and grouping
server, report = settle(method, server, fold, ctx)          # server, once
"""

import math
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.compose import uplink
from sparing.core.context import Ctx
from sparing.core.download import parcel_about
from sparing.core.errors import MethodError, SparingError, TrainingError, WireError
from sparing.core.fold import Arrived, Collect, Fold, without_unsound
from sparing.core.grid import Limits, limits_of, update_limits
from sparing.core.method import (
    Arrival,
    Blended,
    Gradient,
    Lesson,
    Local,
    Method,
    Remembered,
    Report,
    Rows,
    Train,
    Trained,
    View,
)
from sparing.core.ops import against_model, bounds, clear, increments, move_model, overlay
from sparing.core.parcel import Cut, Cuts, Leaf, Parcel, Schema, spec_of_cut
from sparing.core.tree import Layout, Masks, Tree, cleared, column, expand_rows, flat, prefixed, tree_to, under
from sparing.core.versions import broadcast_update, first_past, mark_served, past_to

NOTES_UP = {"n": 1, "loss": 1}


class Server(NamedTuple):
    """All that the server remembers between rounds."""

    model: Tree  # leaves [1, *shape]
    share: Tree
    blend: Tree
    fit: Remembered
    met: Tensor  # int64 [clients], on the host: the last round that each was in; 0: none yet
    limits: Limits  # how large an update of each tensor may be in the next round
    rows: Rows | None = None  # what is kept of every client
    past: Tree = {}  # noqa: RUF012  versions of the model, where the server broadcasts

    @property
    def seen(self) -> Tensor:
        """Who has been in a round before: bool [clients]."""
        return self.met > 0

    @property
    def device(self) -> torch.device:
        return next((x.device for x in self.model.values()), torch.device("cpu"))

    def to(self, device: torch.device) -> "Server":
        model, share, blend, fit = (tree_to(part, device) for part in (self.model, self.share, self.blend, self.fit))
        return Server(model, share, blend, fit, self.met.cpu(), limits_of(model), self.rows, past_to(self.past, device))


def first_server(
    method: Method, model: Tree, clients: int, rows: Rows | None = None, gradient: Gradient | None = None
) -> Server:
    if error := _infinite_layer(model, bounds(model), "at the start"):
        raise error
    model = model | {name: x for name, x in method.extra(model).items() if name not in method.share.private}
    blend = prefixed("weigh", method.blend.weigh.init(model, clients))
    for i, step in enumerate(method.blend.steps):
        blend |= prefixed(str(i), step.init(model, clients))
    fit = method.fit.resize.init(model) if method.fit else {}
    met = torch.zeros(clients, dtype=torch.int64)
    share, past = _shown_gradient(method, method.share.init(model), model, gradient), first_past(method, model, clients)
    return Server(model, share, blend, fit, met, limits_of(model), rows, past)


def first_row(method: Method, model: Tree) -> Tree:
    """What the server keeps of a client it never met, leaves `[1, ...]`; mostly nothing."""
    row: Tree = {}
    for i, step in enumerate(method.blend.steps):
        if step.serving is not None:
            row |= prefixed(str(i), step.serving.row(model))
    return row


def method_for_size(method: Method, ctx: Ctx) -> Method:
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
        gathering = method.fit.resize.gathering if method.fit else None
        return Collect(server.limits, total, method.blend.collect, gathering, server.model)
    uniform = any(step.uniform for step in method.blend.steps)
    return Fold(server.limits, total, ctx.cohort if uniform else 0)


def outgoing(method: Method, server: Server, ctx: Ctx) -> Parcel:
    """What the server sends these K clients; shared parts keep one row."""
    model, notes = _models_for(method, server, ctx)
    if method.fit is not None:
        model = method.fit.resize.shrink(server.fit, model, method.fit.size(ctx), ctx)
    cuts = method_for_size(method, ctx).share.down(server.share, model, ctx)
    return Parcel(_leaves_of(clear(model, _masks_in(cuts)), cuts), notes)


def _models_for(method: Method, server: Server, ctx: Ctx) -> tuple[Tree, dict[str, Tensor]]:
    """The model, or models, for these K clients, and the numbers that go along."""
    model, notes = server.model, {}
    for i, step in enumerate(method.blend.steps):
        if step.serving is not None:
            rows = StepRows(str(i), server.rows) if server.rows is not None else None
            model, said = step.serving.serve(under(str(i), server.blend), model, ctx, rows)
            notes |= said
    return model, notes


class StepRows:
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
    return starting_model(method, state, outgoing(method, server, ctx), ctx)


def starting_model(method: Method, state: Tree, got: Parcel, ctx: Ctx) -> Tree:
    """What came, written over what these K clients keep for themselves."""
    own = method_for_size(method, ctx).share.given(_own_tensors(method, state, ctx), ctx)
    return overlay(own, _values_in(got), {name: leaf.scope for name, leaf in got.leaves.items()})


def _own_tensors(method: Method, state: Tree, ctx: Ctx) -> Tree:
    """What these K clients keep for themselves, in their size."""
    own = under("own", state)
    if method.fit is None or not method.fit.within:
        return own
    return method.fit.resize.shrink({}, own, method.fit.size(ctx), ctx)


def _own_in_full_shape(method: Method, state: Tree, own: Tree, ctx: Ctx) -> Tree:
    """The same in full shape; beyond their size it stays as it was."""
    if method.fit is None or not method.fit.within:
        return own
    full, part = method.fit.resize.grow(own, method.fit.size(ctx), ctx)
    before = under("own", state)
    return {n: x if (mask := part[n]) is None else torch.where(mask, x, before[n]) for n, x in full.items()}


def train_locally(local: Local, train: Train, start: Tree, memory: Tree, ctx: Ctx) -> Trained:
    """Local training with everything that a method puts around it."""
    for wrap in local.wraps:
        train = wrap.around(train, wrap.phases)
    return train(Lesson(start, memory, local.phases), ctx)


Claim = Callable[[Tree, Mapping[str, Tensor], Ctx], Mapping[str, Tensor]]
"""(start, after, ctx): what K clients say they have learned, where that is not what they have: simulated attackers."""


def client(method: Method, state: Tree, parcel: Parcel, train: Train, ctx: Ctx) -> tuple[Parcel, Tree]:
    """K clients: take in what came, train, and write down what goes back."""
    up, _, state = client_claiming(method, state, parcel, train, ctx, lambda start, after, ctx: after)
    return up, state


def client_claiming(
    method: Method, state: Tree, got: Parcel, train: Train, ctx: Ctx, claim: Claim
) -> tuple[Parcel, Parcel, Tree]:
    """The same of clients that may lie: what they send, what they would send in truth, and what they keep.

    They keep what follows from the truth: nobody lies to himself.
    """
    seen_by = method_for_size(method, ctx)
    start = starting_model(method, state, got, ctx)
    memory = under("local", state)
    if seen_by.local.reset:
        moving = [name for name in memory if name.startswith("velocity/")]
        memory |= {name: _forgotten_velocity(memory[name], got.leaves.get(name.rpartition("/")[2])) for name in moving}
    after, local, notes = train_locally(method.local, train, start, memory, ctx)
    cuts = seen_by.share.up(_cuts_in(got), ctx)
    notes = {"n": ctx.placed(ctx.n.to(torch.float32)), "loss": notes["loss"]}

    def written(after: Mapping[str, Tensor]) -> tuple[Parcel, Tree]:
        learned = increments(after, _values_in(got), _masks_in(cuts))
        view = View(ctx, start, after, got.notes)
        return uplink(seen_by).encode(Parcel(_leaves_of(learned, cuts), notes), under("up", state), view)

    honest, memory = written(after)
    said = claim(start, after, ctx)
    up = honest if said is after else written(said)[0]
    own = _own_in_full_shape(method, state, {name: after[name] for name in seen_by.share.own}, ctx)
    return (
        up,
        honest,
        prefixed("own", own) | prefixed("up", expand_rows(memory, len(ctx.ids))) | prefixed("local", local),
    )


def put_back(method: Method, state: Tree, parcel: Parcel, gone_K: Tensor, ctx: Ctx) -> Tree:
    """The state of clients whose upload never arrived: they trained, but their memory takes back what they sent."""
    method = method_for_size(method, ctx)
    memory = prefixed("up", uplink(method).lost(parcel, under("up", state), ctx))
    memory |= prefixed("local", method.local.lost(uplink(method).decode(parcel, ctx), under("local", state)))
    state = dict(state)
    for name, x in memory.items():
        state[name] = torch.where(column(ctx.placed(gone_K), x), x, state[name])
    return state


def voting_masks(method: Method, sent: Parcel, ctx: Ctx) -> dict[str, Tensor | None]:
    """Where these K clients, to whom this was sent, have a vote; a tensor that is absent does not come back."""
    return _masks_in(method_for_size(method, ctx).share.up(_cuts_in(sent), ctx))


def incoming(method: Method, server: Server, fold: Fold | Collect, sent: Parcel, parcel: Parcel, ctx: Ctx) -> None:
    """Validate, decode, compare with the model, and fold in K arrivals."""
    arrival = decoded_arrival(method, server.model, sent, parcel, ctx)
    if method.blend.lenient:
        arrival = without_unsound(arrival, fold)
        if not len(arrival.ctx.ids):
            return
    fold.add(*weighed_arrival(method, server.blend, arrival))


def decoded_arrival(method: Method, model: Tree, sent: Parcel, parcel: Parcel, ctx: Ctx) -> Arrival:
    """K uploads as differences from the model; a client that sees itself so gives what it was sent as the model."""
    seen_by = method_for_size(method, ctx)
    votes = seen_by.share.up(_cuts_in(sent), ctx)
    arrived = uplink(seen_by).decode(parcel, ctx)
    _refuse_strange(arrived, votes, ctx)
    update, scope = _as_update(method, model, sent, arrived, votes, ctx)
    notes = dict(arrived.notes)
    for i, meter in enumerate(method.blend.meters):
        notes |= prefixed(f"meter{i}", meter.watch(parcel, ctx))
    return Arrival(update, scope, notes, model, ctx)


def weighed_arrival(method: Method, state: Tree, arrival: Arrival) -> tuple[Arrival, Tensor, dict[str, Tensor]]:
    """K arrivals as they are blended, their weights, and what is remembered of them; `state` is that of the blend."""
    for i, step in enumerate(method.blend.steps):
        if step.receive is not None:
            arrival = step.receive(under(str(i), state), arrival)
    weight_K, said = method.blend.weigh.of(under("weigh", state), arrival)
    if weight_K.shape != arrival.ctx.ids.shape:
        raise MethodError(
            f"the weighting {method.blend.weigh.name!r} gave a tensor of shape {list(weight_K.shape)} for "
            f"{len(arrival.ctx.ids)} clients; it must give one number each"
        )
    seen = prefixed("weigh", said) | {name: x for name, x in arrival.notes.items() if name.startswith("meter")}
    for i, step in enumerate(method.blend.steps):
        seen |= prefixed(str(i), step.watch(under(str(i), state), arrival))
    _refuse_uneven(seen, len(arrival.ctx.ids))
    return arrival, weight_K, seen


def _refuse_uneven(seen: dict[str, Tensor], k: int) -> None:
    for name, x in seen.items():
        if x.shape[:1] != (k,):
            raise MethodError(
                f"{name!r}, which a part of the blend remembers of {k} clients, has shape {list(x.shape)}; "
                "its first axis must be the clients"
            )


def _as_update(
    method: Method, model: Tree, sent: Parcel, arrived: Parcel, votes: Cuts, ctx: Ctx
) -> tuple[Tree, dict[str, Tensor | None]]:
    """What arrived as differences from the server's model in full shape, and where each client has a vote.

    Whoever has no vote must not leak into the sum, though codecs may fill in what was not sent.
    """
    base, values, fit = _values_in(sent), _values_in(arrived), method.fit
    if fit is None:
        masks = _masks_in(votes)
        if all(step.serving is None for step in method.blend.steps):
            alike = base.keys() - method.share.values
            base |= {name: model[name] for name in alike}  # wherever there is a vote: none goes beyond what was sent
        unclear = dict(masks)
        if not method.up:
            unclear |= {name: None for name in masks if arrived.leaves[name].scope is masks[name]}  # zero elsewhere
        return against_model(model, base, values, unclear), masks
    partition, gathering = fit.resize.partition, fit.resize.gathering
    apart = frozenset[str]().union(*(part.names for part in (partition, gathering) if part is not None))
    same = {n for n, x in values.items() if n in model and x.shape[1:] == model[n].shape[1:] and n not in apart}
    masks = {name: votes[name].mask for name in values if name in same}
    update = against_model(model, base, {name: values[name] for name in masks}, masks)
    resized = {name: x + base[name] if name in base else x for name, x in values.items() if name not in same}
    if not resized:
        return update, masks
    if gathering is not None:
        return update | resized, masks | dict.fromkeys(resized)
    if partition is not None:
        full, covered = partition.cut(resized, fit.size(ctx), ctx)
        return update | full, masks | dict(covered)
    full, covered = fit.resize.grow(resized, fit.size(ctx), ctx)
    origin = model
    if fit.resize.increments:
        before = {name: base[name] if name in base else torch.zeros_like(x) for name, x in resized.items()}
        origin = fit.resize.grow(before, fit.size(ctx), ctx)[0]
    return update | increments(full, origin, covered), masks | dict(covered)


def settle(
    method: Method, server: Server, fold: Arrived, ctx: Ctx, gradient: Gradient | None = None
) -> tuple[Server, Report]:
    """The cohort is complete: blend, run the server's steps, move the model."""
    refused: Report = {"refused": float(fold.roster.refused)} if method.blend.lenient else {}
    if method.blend.lenient and not fold.roster.ids:
        return mark_met(server, ctx), refused
    blended = fold.mean(ctx)
    if method.fit is not None and method.fit.resize.partition is not None:
        blended = method.fit.resize.partition.join(server.fit, server.model, blended)
    reports = [refused, _coverage(blended, method.layout), blended.report]
    reports += [meter.report(under(f"meter{i}", blended.seen)) for i, meter in enumerate(method.blend.meters)]
    blended, state, rows, said = _run_steps(method, server, blended, ctx)
    server, reports = mark_met(server, ctx), [*reports, *said]
    past = server.past
    if method.broadcast is not None:
        blended, past, broadcast = broadcast_update(method, server.model, past, blended, ctx)
        reports.append(broadcast)
    model = move_model(server.model, blended.update, blended.covered)
    limits = _checked_limits(model, f"after round {ctx.round}", ctx)
    share, learned = method.share.learn(server.share, blended, ctx)
    share = _shown_gradient(method, share, model, gradient)
    reports.append(learned)
    fit = server.fit
    if method.fit is not None:
        fit, learned = method.fit.resize.learn(fit, model, ctx)
        reports.append(learned)
    if rows and server.rows is not None:
        server.rows.write(blended.ids, rows)
    return Server(model, share, state, fit, server.met, limits, server.rows, past), ChainMap(*reversed(reports))  # pyright: ignore


def _run_steps(method: Method, server: Server, blended: Blended, ctx: Ctx) -> tuple[Blended, Tree, Tree, list[Report]]:
    """The weighting learns and the server's steps run: (update, their state, rows to keep, reports)."""
    mine = blended._replace(seen=under("weigh", blended.seen))
    memory, said = method.blend.weigh.learn(under("weigh", server.blend), mine, ctx)
    state, rows, reports = prefixed("weigh", memory), {}, [said]
    for i, step in enumerate(method.blend.steps):
        mine = blended._replace(seen=under(str(i), blended.seen))
        update, memory, said = step.apply(under(str(i), server.blend), mine, ctx)
        if step.serving is not None and step.serving.keep:
            rows |= prefixed(str(i), under(step.serving.keep, mine.seen))
        blended = blended._replace(update=update)
        state |= prefixed(str(i), memory)
        reports.append(said)
    return blended, state, rows, reports


def mark_met(server: Server, ctx: Ctx) -> Server:
    """After these clients were served, whether or not anything came back."""
    met = server.met.index_fill(0, ctx.ids, ctx.round)
    return server._replace(met=met, past=mark_served(server.past, ctx))


def _shown_gradient(method: Method, share: Tree, model: Tree, gradient: Gradient | None) -> Tree:
    """The share's state for this model, once it has seen a gradient there, where the method asks for one."""
    if not method.probe:
        return share
    if gradient is None:
        raise MethodError("the method scores positions on a probe set, and the server has none; give it a gradient")
    return method.share.look(share, gradient(model))


def schema_down(method: Method, initial: Tree, ctx: Ctx) -> Schema:
    """What one client (K = 1) expects, built from the initial model and ctx alone."""
    serving = [step.serving for step in method.blend.steps if step.serving is not None]
    notes = {name: size for one in serving for name, size in one.notes.items()}
    method = method_for_size(method, ctx)
    cuts = method.share.down(method.share.init(initial), initial, ctx)
    return _plain_schema(method.layout, cuts, notes, f"{parcel_about(ctx)}/down")


def schema_up(method: Method, sent: Parcel, ctx: Ctx) -> Schema:
    """What the server expects back from one client (K = 1) to which it sent this parcel."""
    method = method_for_size(method, ctx)
    cuts = method.share.up(_cuts_in(sent), ctx)
    _refuse_votes_beyond(method, sent, cuts, ctx)
    return uplink(method).schema(_plain_schema(method.layout, cuts, NOTES_UP, f"{parcel_about(ctx)}/up"), ctx)


def _plain_schema(layout: Layout, cuts: Cuts, notes: dict[str, int], about: str) -> Schema:
    leaves = {name: spec_of_cut(layout.shapes[name], layout.dtypes[name], cut) for name, cut in cuts.items()}
    return Schema(leaves, notes, about)


def _cuts_in(parcel: Parcel) -> Cuts:
    return {name: Cut(leaf.scope, leaf.told) for name, leaf in parcel.leaves.items()}


def _masks_in(cuts: Cuts) -> dict[str, Tensor | None]:
    return {name: cut.mask for name, cut in cuts.items()}


def _values_in(parcel: Parcel) -> Tree:
    return {name: leaf.value for name, leaf in parcel.leaves.items()}


def _leaves_of(values: Tree, cuts: Cuts) -> dict[str, Leaf]:
    return {name: Leaf(values[name], scope=cut.mask, told=cut.told) for name, cut in cuts.items()}


def _forgotten_velocity(memory: Tensor, written: Leaf | None) -> Tensor:
    """Zero where the server has just written."""
    if written is None:
        return memory
    return torch.zeros_like(memory) if written.scope is None else cleared(memory, ~written.scope)


def _refuse_strange(arrived: Parcel, votes: Cuts, ctx: Ctx) -> None:
    """A decoded parcel must hold exactly the tensors it was asked for, and sensible notes."""
    if arrived.leaves.keys() != votes.keys():
        odd = min(arrived.leaves.keys() ^ votes.keys())
        raise WireError(f"round {ctx.round}: parcels and method disagree about {odd!r}; use one config on both ends")
    for name, leaf in arrived.leaves.items():
        if leaf.value.dtype == torch.int8:
            raise MethodError(
                f"{name!r} arrives as codes, which no codec has decoded; give the one that made them a `decode`"
            )
    n_K = arrived.notes["n"]
    some_K = n_K >= 1

    def no_samples() -> WireError:
        k = int((~some_K).nonzero()[0])
        return WireError(
            f"round {ctx.round}: client {int(ctx.ids[k])} reported {float(n_K[k]):g} samples; it must have at least one"
        )

    ctx.require(some_K, no_samples)


def _refuse_votes_beyond(method: Method, sent: Parcel, votes: Cuts, ctx: Ctx) -> None:
    """Of a tensor that came down, only what came may go up: elsewhere there is nothing to compare it with."""
    for name in sorted((votes.keys() & sent.leaves.keys()) - method.share.values):
        got, vote = sent.leaves[name].scope, votes[name].mask
        if got is None or got is vote:
            continue
        beyond = ~got if vote is None else vote & ~got

        def too_much(name: str = name, beyond: Tensor = beyond) -> MethodError:
            return MethodError(
                f"round {ctx.round}: {int(beyond.sum())} entries of {name!r} go up though they did not come down; "
                f"let the share's `up` stay within what it is given, or send the tensor in one direction only"
            )

        ctx.require(~beyond.any(), too_much)


def _checked_limits(model: Tree, when: str, ctx: Ctx) -> Limits:
    """How large the next updates may be, of a model that must be finite."""
    sizes = bounds(model)
    ctx.require(sizes < math.inf, lambda: _infinite_layer(model, sizes, when) or SparingError(when))
    return update_limits(model, sizes)


def _infinite_layer(model: Tree, sizes: Tensor, when: str) -> TrainingError | None:
    for name, fine in zip(model, (sizes < math.inf).tolist(), strict=True):
        if not fine:
            return TrainingError(f"layer {name!r} of the server's model is not finite {when}; lower the learning rates")
    return None


def _coverage(blended: Blended, layout: Layout) -> Report:
    return {"coverage": voted_count(blended.update, blended.covered, layout).double() / max(layout.size, 1)}


def voted_count(update: Tree, covered: Masks, layout: Layout) -> Tensor:
    """How many of the parameters somebody voted on."""
    masks = {name: covered[name] for name in layout.params if name in update}
    hit = sum(update[name].numel() for name, mask in masks.items() if mask is None)
    some = [flat(mask) for mask in masks.values() if mask is not None]
    return torch.cat(some, dim=1).sum() + hit if some else torch.tensor(hit)
