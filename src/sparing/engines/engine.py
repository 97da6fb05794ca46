"""What every engine takes and gives. An engine says where clients run; what they do is in `core.round`."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sparing.core.keys import Ctx
from sparing.core.protocols import Method, Report
from sparing.core.round import Server
from sparing.core.tree import Tree
from sparing.task.local import train
from sparing.task.task import Task


class Job(NamedTuple):
    """One run, as an engine sees it. `initial` is the model that every client can build from the seed."""

    method: Method
    task: Task
    model: nn.Module
    initial: Tree
    seed: int
    rounds: int
    path: str = "loop"  # of local training: "loop" or "stacked"
    chunk: int = 16  # clients in memory at once
    threads: int = 1  # clients training side by side

    def train(self, start: Tree, memory: Tree, ctx: Ctx) -> tuple[Tree, Tree, dict[str, Tensor]]:
        local = self.method.local
        after, notes = train(
            self.model, self.task.loss, self.task.train, local, start, ctx, path=self.path, threads=self.threads
        )
        return after, memory, notes


class Rows(Protocol):
    """Where client state lives: a bank."""

    def read(self, ids: Tensor) -> Tree: ...

    def write(self, ids: Tensor, rows: Tree) -> None: ...


class Outcome(NamedTuple):
    """What a round came to, one row per client in id order."""

    ids: Tensor  # [n]
    n: Tensor  # [n] samples
    loss: Tensor  # [n] mean training loss
    down: dict[str, Tensor]  # bytes by kind (value, index, scale, header, notes), each [n]
    up: dict[str, Tensor]
    report: Report


class Evaluation(NamedTuple):
    """The global model on everyone's test samples, and each client's own model on its own."""

    accuracy: float
    loss: float
    ids: Tensor  # [m] clients evaluated
    own_accuracy: Tensor  # [m]


class Engine(Protocol):
    def round(self, server: Server, ids: Tensor, t: int) -> tuple[Server, Outcome]: ...

    def evaluate(self, server: Server, ids: Tensor) -> Evaluation: ...


def context(job: Job, server: Server, ids: Tensor, t: int) -> Ctx:
    """What both ends know in round t about these clients."""
    count, device = job.task.train.count, server.seen.device
    ids = ids.to(device)
    return Ctx(
        seed=job.seed,
        round=t,
        rounds=job.rounds,
        ids=ids,
        n=count[ids.cpu()].to(device),
        clients=len(count),
        samples=int(count.sum()),
        cohort=len(ids),
        first=~server.seen[ids],
    )


def chunks(ctx: Ctx, size: int) -> Iterator[Ctx]:
    """The cohort in parts of at most `size` clients, those with similar amounts of data together."""
    order = torch.argsort(ctx.n, stable=True)
    for part in order.split(size):
        yield ctx.at(part)


class Tally:
    """Collects the parts of a round's outcome, in whatever order clients come, and hands them out in id order."""

    def __init__(self) -> None:
        self.parts: list[tuple[Ctx, dict[str, Tensor], dict[str, Tensor], Tensor]] = []

    def add(self, ctx: Ctx, down: dict[str, Tensor], up: dict[str, Tensor], loss: Tensor) -> None:
        both = [{kind: x.expand(len(ctx.ids)) for kind, x in sizes.items()} for sizes in (down, up)]
        self.parts.append((ctx, both[0], both[1], loss))

    def outcome(self, report: Report) -> Outcome:
        ids = torch.cat([ctx.ids for ctx, *_ in self.parts]).cpu()
        order = ids.argsort()

        def gather(pieces: list[Tensor]) -> Tensor:
            return torch.cat([p.cpu() for p in pieces])[order]

        down = {kind: gather([p[1][kind] for p in self.parts]) for kind in self.parts[0][1]}
        up = {kind: gather([p[2][kind] for p in self.parts]) for kind in self.parts[0][2]}
        n = gather([ctx.n for ctx, *_ in self.parts])
        return Outcome(ids[order], n, gather([p[3] for p in self.parts]), down, up, report)
