"""The training loop, top to bottom. Loggers are functions `(Record) -> None`."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from sparing.core import tree
from sparing.core.errors import ConfigError
from sparing.core.round import Server
from sparing.engines.engine import Engine, Job, Outcome
from sparing.engines.evaluation import Wanted
from sparing.run import pictures
from sparing.run.accountant import Account, account
from sparing.run.bank import Bank
from sparing.run.clock import clocked, is_timed
from sparing.run.config import EvaluateSection, Study
from sparing.run.folder import Folder
from sparing.run.heap import give_back
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
    fingerprint: str  # what a checkpoint must agree with; empty where there is no folder for one
    job: Job
    rows: Bank | None = None  # what the server keeps of every client
    scratch: TemporaryDirectory | None = None  # holds the slot file of a run without a folder
    done: int = 0  # rounds
    seconds: float = 0.0  # spent before this process
    table: list[Record] = field(default_factory=list)

    def close(self) -> None:
        self.bank.close()
        if self.rows:
            self.rows.close()
        if self.scratch:
            self.scratch.cleanup()
        give_back()


def loop(run: Run, loggers: Sequence[Logger] = ()) -> Result:
    """Train the rounds that are left."""
    study, began = run.study, time.perf_counter() - run.seconds
    count = cohort_size(run.clients - len(run.job.task.held_out), study.sample)
    wanted = wanted_of(study.evaluate, run.job)
    spending = spending_of(run.job, count)
    last = spending.last if spending else study.rounds

    def finish(t: int, under_way: Callable[[], Outcome], views: list) -> None:
        """Say how round t went, and keep it."""
        outcome, evaluation = under_way(), None
        if is_timed(run.job.fleet):
            so_far = run.table[-1].metrics.get("clock", 0.0) if run.table else 0.0
            outcome = outcome._replace(report=outcome.report | clocked(run.job, outcome, t, so_far))
        if spending:
            outcome = outcome._replace(report=outcome.report | {"epsilon": spending.spent(t)})
        if t % study.evaluate.every == 0 or t == last:
            evaluation = run.engine.evaluate(run.server, t, wanted)
        record = Record.of(t, outcome, evaluation, time.perf_counter() - began)
        run.table.append(record)
        run.done = t
        if run.folder:
            run.folder.append(t, record, outcome, evaluation, pictures.text(views))
            if t % study.checkpoint == 0 or t == last:
                meta = {"round": t, "seconds": record.seconds, "fingerprint": run.fingerprint}
                run.folder.save(run.server, run.bank, run.rows, meta)
        for log in loggers:
            log(record)

    waiting: list[Callable[[], None]] = []  # a round that the GPU may not have finished when the next one starts
    try:
        for t in range(run.done + 1, last + 1):
            ids = run.job.fleet.cohort(study.seed, t, run.clients, count)
            shown = run.folder is not None and pictures.is_shown(t, last)
            views = pictures.before(run.job, run.bank, run.server, ids, t, study.record) if shown else []
            run.server, under_way = run.engine.start(run.server, ids, t)
            views += pictures.after(run.job, run.server, t) if shown else []
            while waiting:
                waiting.pop()()
            waiting.append(partial(finish, t, under_way, views))
            looked_at = t % study.evaluate.every == 0 or (run.folder is not None and t % study.checkpoint == 0)
            if looked_at or t == last or run.server.device.type != "cuda":
                waiting.pop()()
    finally:
        while waiting:
            waiting.pop()()
    result = result_of(run, spending)
    if run.folder:
        run.folder.finish(result)
    return result


def cohort_size(clients: int, sample: int | float) -> int:
    """How many clients a round asks for: a count, or a share of all, rounded."""
    count = sample if isinstance(sample, int) else math.floor(sample * clients + 0.5)
    if count > clients:
        raise ConfigError(f"sample asks for {count} clients a round, but there are {clients}; lower sample")
    if count < 1:
        raise ConfigError(f"sample {sample} of {clients} clients is nobody; raise it to {0.5 / clients:.3g} or more")
    return count


def wanted_of(section: EvaluateSection, job: Job) -> Wanted:
    """Who is looked at: at most so many of the clients that train; also tuned, where the method says how; new ones."""
    training = torch.ones(len(job.task), dtype=torch.bool)
    training[job.task.held_out] = False
    ids = training.nonzero()[:, 0]
    joined = [("after", job.method.local.tune is not None), ("new", len(job.task.held_out) > 0)]
    who = tuple(section.who) + tuple(name for name, asked in joined if asked and name not in section.who)
    return Wanted(ids[spread(len(ids), section.clients)], who, section.steps)


def spread(clients: int, most: int) -> Tensor:
    """At most so many places, evenly spread over all: the same ones every time."""
    if clients <= most:
        return torch.arange(clients)
    return torch.linspace(0, clients - 1, most, dtype=torch.float64).round().long()


def spending_of(job: Job, count: int) -> Account | None:
    """What the run spends of its clients' privacy, where the method promises any."""
    if job.method.privacy is None:
        return None
    return account(job.method.privacy, job.fleet, len(job.task), count, job.seed, job.rounds)


def result_of(run: Run, spending: Account | None = None) -> Result:
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
        model={name: x[0].cpu().clone() for name, x in run.job.network(run.server.model).items()},
        epsilon=spending.spent(run.done) if spending else math.nan,
        stopped=spending.why if spending else "",
    )
