"""What every engine takes and gives. An engine says where clients run; what they do is in `core.round`."""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sparing.core.context import Ctx, Requirement
from sparing.core.context import context as context_of
from sparing.core.download import download_kinds
from sparing.core.method import Fit, Lesson, Method, Trained, nothing
from sparing.core.ops import restrict
from sparing.core.parcel import Schema
from sparing.core.round import Server, outgoing
from sparing.core.threads import deal_by_load
from sparing.core.tree import Rest, Tree, cat_trees, under
from sparing.fleet.fleet import Fleet
from sparing.secure_round.settings import SecureSettings
from sparing.tasks.task import Task
from sparing.train.gradient import gradient_at
from sparing.train.local import train
from sparing.train.paths import TrainPath, path_called
from sparing.train.pieces import WHOLE, StepPieces

if TYPE_CHECKING:
    from sparing.engines.evaluation import Wanted

Sizes = dict[str, Tensor]  # bytes by kind, each [K]
LaterSizes = Callable[[], Sizes]
"""Sizes for which a device is waited for by whoever calls this."""
Post = Callable[[Ctx, str, bytes, list[Schema]], None]
"""Sees what a client is sent "down" or sends "up", and what the receiver expects of each parcel in it."""


class Job(NamedTuple):
    """One run, as an engine sees it. `initial` is the model that every client can build from the seed."""

    method: Method
    task: Task
    model: nn.Module
    initial: Tree
    seed: int
    rounds: int
    path: str = "loop"  # of local training: a name in `train.paths`
    chunk: int = 16  # clients in memory at once
    threads: int = 1  # see `aside` and `within`
    precision: str = "float32"  # of local training, or "bf16", on CUDA also "tf32"
    graph: bool = False  # local training as a CUDA graph
    fleet: Fleet = Fleet()
    rest: Rest = Rest({}, {})  # what the model needs beside what is learned
    secure: SecureSettings | None = None  # None: the server sees every upload
    pieces: StepPieces = WHOLE  # of a training step
    sizes: tuple[nn.Module, ...] = ()  # the model of each size, where clients differ

    @property
    def first_tensors(self) -> Tree:
        """The initial model with all that is frozen in it: what both ends of a network must have alike."""
        return self.initial | self.rest.fixed

    @property
    def training(self) -> TrainPath:
        return path_called(self.path)

    @property
    def aside(self) -> int:
        """Chunks side by side."""
        return self.threads // self.within

    @property
    def within(self) -> int:
        """Threads within one operation: all, where a round is a few large products and nobody's weights are formed."""
        return self.threads if self.path == "implicit" and not self.looks_at_updates else 1

    @property
    def looks_at_updates(self) -> bool:
        """Whether something but the mean looks at every client's update, or keeps its weights."""
        share, up, blend = self.method.share, self.method.up, self.method.blend
        watched = any(step.watch is not nothing for step in blend.steps)
        return bool(up or share.own or blend.collect or watched)

    def train(self, lesson: Lesson, ctx: Ctx) -> Trained:
        """K clients on their own samples."""
        local = self.method.local._replace(phases=lesson.phases)
        memory = {name: x.clone() for name, x in lesson.memory.items()}
        anchor = None if lesson.anchor is None else self.network(lesson.anchor)
        after, notes = train(
            self.model_for(ctx), self.task.loss, self.task.train, local, self.network(lesson.start), ctx, self.path,
            memory, anchor, lesson.pull or None, self.precision, self.graph, self.within, self.pieces,
        )  # fmt: skip
        names = set(after)
        return Trained(restrict(after, [name for name in lesson.start if name in names]), memory, notes)

    def timed(self, ctx: Ctx, down: LaterSizes) -> Ctx:
        """The same round, once it is known how much went down to these K clients."""
        return ctx if self.fleet.deadline is None else self.fleet.timed(self.method.local, ctx, total_bytes(down()))

    def gone(self, ctx: Ctx, up: LaterSizes) -> Tensor:
        """Whose upload never arrives: bool `[K]`. How large it is matters only where a round has a deadline."""
        return self.fleet.gone(ctx, torch.tensor(0) if ctx.budget is None else total_bytes(up()))

    def gradient(self, model: Tree) -> Tree:
        """Of the loss on the server's probe set, at its model."""
        assert self.task.probe is not None  # else the run was refused
        static = self.method.local.buffers == "static"
        how = (static, self.training.runner.copy)
        return gradient_at(self.model, self.task.loss, self.network(model), *self.task.probe, *how)

    def network(self, tree: Tree) -> Tree:
        """All that the network needs to run, and nothing that a method put beside it for itself."""
        extra = self.method.layout.extra - self.rest.fixed.keys()
        return self.rest.complete({name: x for name, x in tree.items() if name not in extra})

    def used(self, tree: Tree) -> Tree:
        """The network that clients use."""
        return self.network(self.method.local.used(tree))

    def model_for(self, ctx: Ctx) -> nn.Module:
        """The network that these K clients run."""
        return self.sizes[self.method.fit.size(ctx)] if self.method.fit else self.model


TRAIN_LOSS = "train_loss"
"""In the report of a round of which no client's own loss is known."""


class Outcome(NamedTuple):
    """What a round came to, one row per client in id order."""

    ids: Tensor  # [n]
    n: Tensor  # [n] samples
    loss: Tensor  # [n] mean training loss
    down: Sizes  # value, index, scale, header, notes
    up: Sizes
    arrived: Tensor  # [n] bool: false for clients that vanished before their upload, or were late with it
    report: dict[str, float]


class Marks(NamedTuple):
    """How some clients' models do on their own test samples."""

    ids: Tensor  # [m]
    samples: Tensor  # [m] in their test sets
    accuracy: Tensor  # [m]
    loss: Tensor  # [m]
    auc: Tensor  # [m]
    met: Tensor  # [m] bool: who has ever taken part
    asked: Tree = {}  # noqa: RUF012  [m] of each metric that the task asks for


class Evaluation(NamedTuple):
    """The global model on everyone's test samples, and marks for each kind of client model asked for."""

    accuracy: float
    loss: float
    auc: float
    marks: dict[str, Marks]
    asked: dict[str, float] = {}  # noqa: RUF012  the metrics that the task asks for


class Engine(Protocol):
    def round(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Outcome]: ...

    def start(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Callable[[], Outcome]]:
        """The same round, of which the host need not know yet how it went; what comes back says so when called."""
        ...

    def evaluate(self, server: Server, t: int, wanted: "Wanted") -> Evaluation: ...


def cohort_context(job: Job, server: Server, ids: Tensor, t: int, requirements: list[Requirement] | None = None) -> Ctx:
    """What both ends know in round t about these clients."""
    count, ids = job.task.train.count, ids.cpu()
    return context_of(
        seed=job.seed,
        round=t,
        rounds=job.rounds,
        ids=ids,
        n=count[ids],
        clients=len(count),
        samples=job.task.samples,
        cohort=len(ids),
        first=~server.seen[ids],
        capacity={name: x[ids] for name, x in job.fleet.capacity.items()} or None,
        held=len(job.task.held_out),
        device=server.device,
        requirements=requirements,
    )


def without_absent(job: Job, server: Server, cohort: Ctx, tally: "Tally") -> Ctx:
    """Those of the cohort to whom the round happens. Of the others, where there are any, it tells what was sent."""
    here_K = job.fleet.counted(cohort)
    if bool(here_K.all()):
        return cohort
    for k in (~here_K).nonzero()[:, 0].tolist():
        ctx = cohort.at(slice(k, k + 1))
        sent = download_kinds(job.method, server.past, outgoing(job.method, server, ctx), ctx)[1]
        reached = bool(job.fleet.reached(ctx)[0])
        tally.add_absent(ctx, sent if reached else {kind: torch.zeros_like(x) for kind, x in sent.items()})
    return cohort.at(here_K.nonzero()[:, 0])


def chunks_of_size(ctx: Ctx, size: int, fit: Fit | None) -> Iterator[Ctx]:
    """The cohort in parts of at most `size` clients with models of one size, similar amounts of data together."""
    return _chunk_pieces(ctx, -(-len(ctx.ids) // size), fit)


def chunks_by_thread(job: Job, ctx: Ctx) -> Iterator[Ctx]:
    """The same for `job.aside` chunks at once, which together have at most `job.chunk` clients (or one each).

    Every thread gets equally many chunks; where clients train in turn, of equally much data, so that no thread waits.
    """
    turns = -(-len(ctx.ids) // (max(1, job.chunk // job.aside) * job.aside))
    if job.aside > 1 and path_called(job.path).in_turn and not job.method.fit:
        return _dealt_chunks(ctx, turns * job.aside)
    return _chunk_pieces(ctx, turns * job.aside, job.method.fit)


def _dealt_chunks(ctx: Ctx, count: int) -> Iterator[Ctx]:
    """So many chunks: clients with much data are dealt out first, every other turn goes from the last chunk back.

    With one client each, they come as from `_chunk_pieces`.
    """
    return (ctx.at(hand) for hand in reversed(deal_by_load(ctx.n, count)) if len(hand))


def _chunk_pieces(ctx: Ctx, count: int, fit: Fit | None) -> Iterator[Ctx]:
    """About so many chunks, of equally many clients."""
    if count == 1 and fit is None:
        yield ctx
        return
    order = ctx.n.argsort(stable=True)
    kind = fit.sizes(ctx)[order] if fit else torch.zeros_like(order)
    kind, grouped = kind.sort(stable=True)
    order, whole, start = order[grouped], len(order), 0
    if order.tolist() != list(range(whole)):
        ctx = ctx.at(order)  # at once: parts are then views
    for many in kind.unique_consecutive(return_counts=True)[1].tolist():
        turns = min(many, -(-count * many // whole))
        for i in range(turns):
            part = many // turns + (i < many % turns)
            yield ctx if part == whole else ctx.at(slice(start, start + part))
            start += part


def total_bytes(sizes: Sizes) -> Tensor:
    """Of all kinds together: `[K]`, or `[1]` where it is the same for all."""
    return sum(sizes.values(), torch.tensor(0))


def sizes_of_arrived(sizes: LaterSizes, gone_K: Tensor) -> LaterSizes:
    """The same where clients that are gone uploaded nothing."""
    if not bool(gone_K.any()):
        return sizes
    return lambda: {kind: x * ~gone_K.cpu() for kind, x in sizes().items()}


class Tally:
    """Collects the parts of a round's outcome, in whatever order clients come, and hands them out in id order."""

    def __init__(self) -> None:
        self.parts: list[Tree] = []
        self.losses: list[Tensor] = []  # [K] each, wherever they were computed
        self.sizes: list[tuple[LaterSizes, LaterSizes]] = []  # down and up

    def add(self, ctx: Ctx, down: LaterSizes, up: LaterSizes, loss: Tensor, gone_K: Tensor) -> None:
        """K clients, some of whom may be gone."""
        self.parts.append({"ids": ctx.ids, "n": ctx.n, "arrived": ~gone_K.cpu()})
        self.losses.append(loss)
        self.sizes.append((down, up))

    def add_absent(self, ctx: Ctx, down: Sizes) -> None:
        """Clients to whom this was sent, and from whom nothing counts."""
        nothing = {kind: torch.zeros_like(x) for kind, x in down.items()}
        gone_K = torch.ones(len(ctx.ids), dtype=torch.bool)
        self.add(ctx, lambda: down, lambda: nothing, torch.full((len(ctx.ids),), math.nan), gone_K)

    @property
    def arrivals(self) -> int:
        return sum(int(part["arrived"].sum()) for part in self.parts)

    def outcome(self, losses: list[Tensor], report: dict[str, float]) -> Outcome:
        """With the losses on the host."""
        if not self.parts:
            none = torch.zeros(0)
            return Outcome(none.long(), none.long(), none, {}, {}, none.bool(), report)
        for part, loss, (down, up) in zip(self.parts, losses, self.sizes, strict=True):
            k = len(part["ids"])
            part["loss"] = loss
            part.update({f"down/{kind}": x.expand(k) for kind, x in down().items()})
            part.update({f"up/{kind}": x.expand(k) for kind, x in up().items()})
        whole = cat_trees(self.parts) if len(self.parts) > 1 else self.parts[0]
        if bool((whole["ids"][1:] < whole["ids"][:-1]).any()):
            order = whole["ids"].argsort()
            whole = {name: x[order] for name, x in whole.items()}
        down, up = under("down", whole), under("up", whole)
        return Outcome(whole["ids"], whole["n"], whole["loss"], down, up, whole["arrived"], report)
