"""The training loop, top to bottom. Loggers are functions `(Record) -> None`."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from sparing.core import tree
from sparing.core.errors import ConfigError
from sparing.core.keys import EVERYONE, Ctx
from sparing.core.round import Server
from sparing.engines.engine import Engine, Evaluation
from sparing.run.bank import Bank
from sparing.run.config import Study
from sparing.run.folder import Folder
from sparing.run.results import Record, Result, best, last

Logger = Callable[[Record], None]


@dataclass
class Run:
    """A run between two rounds."""

    study: Study
    name: str  # of the task
    clients: int
    engine: Engine
    bank: Bank
    server: Server
    folder: Folder | None
    fingerprint: str
    scratch: TemporaryDirectory | None = None  # holds the slot file of a run without a folder
    done: int = 0  # rounds
    seconds: float = 0.0  # spent before this process
    table: list[Record] = field(default_factory=list)

    def close(self) -> None:
        self.bank.close()
        if self.scratch:
            self.scratch.cleanup()


def loop(run: Run, loggers: Sequence[Logger] = ()) -> Result:
    """Train the rounds that are left."""
    study, began = run.study, time.perf_counter() - run.seconds
    watched = spread(run.clients, study.evaluate.clients)
    for t in range(run.done + 1, study.rounds + 1):
        ids = cohort(study.seed, t, run.clients, study.sample)
        run.server, outcome = run.engine.round(run.server, ids, t)
        evaluation: Evaluation | None = None
        if t % study.evaluate.every == 0 or t == study.rounds:
            evaluation = run.engine.evaluate(run.server, watched)
        record = Record.of(t, outcome, evaluation, time.perf_counter() - began)
        run.table.append(record)
        run.done = t
        if run.folder:
            run.folder.append(t, record, outcome)
            if t % study.checkpoint == 0 or t == study.rounds:
                meta = {"round": t, "seconds": record.seconds, "fingerprint": run.fingerprint}
                run.folder.save(run.server, run.bank, meta)
        for log in loggers:
            log(record)
    result = result_of(run)
    if run.folder:
        run.folder.finish(result)
    return result


def cohort(seed: int, t: int, clients: int, sample: int | float) -> Tensor:
    """Who takes part in round t: `[n]` ids in order, a share of all clients or a count, drawn without replacement."""
    count = sample if isinstance(sample, int) else round(sample * clients)
    if count > clients:
        raise ConfigError(f"sample asks for {count} clients a round, but there are {clients}; lower sample")
    if count < 1:
        raise ConfigError(f"sample {sample} of {clients} clients is nobody; raise sample to at least {1 / clients:.3g}")
    everyone = torch.tensor([EVERYONE])
    ctx = Ctx(seed, t, 0, everyone, everyone, clients, 0)
    return ctx.choose("cohort", clients, count)[0].nonzero()[:, 0]


def spread(clients: int, most: int) -> Tensor:
    """At most so many clients, evenly spread over all: the same ones every time."""
    if clients <= most:
        return torch.arange(clients)
    return torch.linspace(0, clients - 1, most, dtype=torch.float64).round().long()


def result_of(run: Run) -> Result:
    table = run.table
    return Result(
        task=run.name,
        method="+".join(entry if isinstance(entry, str) else next(iter(entry)) for entry in run.study.method),
        rounds=run.done,
        seed=run.study.seed,
        accuracy=last(table, "accuracy"),
        best_accuracy=best(table),
        personal_accuracy=last(table, "personal_accuracy"),
        worst_decile=last(table, "worst_decile"),
        loss=last(table, "loss"),
        up_bytes=sum(r.up_bytes for r in table),
        down_bytes=sum(r.down_bytes for r in table),
        seconds=table[-1].seconds if table else 0.0,
        model_sha256=tree.sha256(run.server.model),
        table=table,
        model={name: x[0].cpu().clone() for name, x in run.server.model.items()},
    )
