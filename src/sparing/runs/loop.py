"""The training loop, top to bottom. Loggers are functions `(Record) -> None`."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.core import tree
from sparing.core.context import EVERYONE
from sparing.core.errors import CheckpointError, ConfigError
from sparing.core.method import Rows
from sparing.core.round import Server
from sparing.engines.engine import Engine, Evaluation, Job, Outcome
from sparing.engines.evaluation import Wanted
from sparing.ranks.agreement import refuse_other_models
from sparing.ranks.group import Ranks
from sparing.ranks.shards import FetchedRows, RankRows
from sparing.runs import snapshots
from sparing.runs.files.run_folder import RunFolder
from sparing.runs.identity import RunIdentity
from sparing.runs.malloc import return_freed_memory
from sparing.runs.privacy.accountant import PrivacyAccount, open_privacy_account, privacy_promise
from sparing.runs.privacy.releases import Releases
from sparing.runs.privacy.secret import Secret, delete_secret
from sparing.runs.results import Record, Result, highest_accuracy, latest_value
from sparing.runs.round_times import clock_report, is_timed
from sparing.runs.study import EvaluateSection, Study
from sparing.storage.bank import Bank

Logger = Callable[[Record], None]


class OwedRound(NamedTuple):
    """How a round went whose model must be saved before clients may be shown it for evaluation."""

    round: int
    outcome: Outcome
    pictures: str

    def tensors(self) -> tree.Tree:
        plain = {name: getattr(self.outcome, name) for name in _OUTCOME_TENSORS}
        return plain | tree.prefixed("down", self.outcome.down) | tree.prefixed("up", self.outcome.up)

    def meta(self) -> dict[str, Any]:
        return {"round": self.round, "report": self.outcome.report, "pictures": self.pictures}

    @classmethod
    def of(cls, tensors: tree.Tree, meta: dict[str, Any]) -> "OwedRound":
        ids, n, loss, arrived = (tensors[name] for name in _OUTCOME_TENSORS)
        down, up = (tree.under(way, tensors) for way in ("down", "up"))
        return cls(meta["round"], Outcome(ids, n, loss, down, up, arrived, meta["report"]), meta["pictures"])


_OUTCOME_TENSORS = ("ids", "n", "loss", "arrived")


@dataclass
class RunState:
    """A run between two rounds."""

    study: Study
    clients: int
    engine: Engine
    bank: Bank
    server: Server
    folder: RunFolder | None
    job: Job
    rows: Bank | None = None  # what the server keeps of every client
    scratch: TemporaryDirectory | None = None  # holds the slot file of a run without a folder
    secret: Secret | None = None  # what its noise is drawn from, if from a secret
    releases: Releases = field(default_factory=Releases)
    identity: RunIdentity = field(default_factory=dict)  # what must be the same on resume; empty without a folder
    done: int = 0  # rounds
    seconds: float = 0.0  # up to the last round that is done
    table: list[Record] = field(default_factory=list)
    spending: PrivacyAccount | None = None  # of privacy, as it is known so far
    owed: OwedRound | None = None  # a round that is settled and saved, and not yet evaluated
    ranks: Ranks | None = None  # that play it together

    def __post_init__(self) -> None:
        training = self.clients - len(self.job.task.held_out)
        self.count = cohort_size(training, self.study.sample)
        if self.study.engine == "network":
            self.count = min(training, math.ceil(self.count * (1 + self.study.network.over) - 1e-9))
        if self.job.fleet.arrivals is not None:
            self.count = max(self.count, self.job.fleet.arrivals.most_asked)
        self.recount()

    def recount(self) -> None:
        """What the run spends of its clients' privacy, given what it has released."""
        self.spending = privacy_account(self.job, self.count, self.releases)

    @property
    def last(self) -> int:
        """The last round there will be."""
        return self.spending.last if self.spending else self.study.rounds

    def release(self, t: int, stopping: bool = False) -> None:
        """Called before anything of round t is written, printed or sent: epsilon counts it from here on."""
        found, privacy = self.secret.released(t) if self.secret else {}, self.job.method.privacy
        if self.ranks and self.secret and not stopping:
            found = {int(who): digest for some in self.ranks.gather_json(found) for who, digest in some.items()}
        if not found or not privacy:
            return
        mine = {who: digest for who, digest in found.items() if (who == EVERYONE) == (privacy.mode == "central")}
        if self.releases.add(t, mine):
            free = self.job._replace(method=self.job.method._replace(privacy=privacy._replace(epsilon=None)))
            account = privacy_account(free, self.count, self.releases)
            if account and privacy.epsilon is not None and account.spent(t) > privacy.epsilon:
                raise CheckpointError(
                    f"round {t} comes to other values than when it was released before; both together spend epsilon "
                    f"{account.spent(t):.4g}, more than dp.epsilon {privacy.epsilon:g}: the run ends here"
                )
            self.recount()
        if self.folder:
            self.folder.lock.check()
        self.releases.write()

    def with_costs(self, t: int, outcome: Outcome) -> Outcome:
        """The same, with the time and the privacy that the rounds up to t took."""
        report = dict(outcome.report)
        if is_timed(self.job.fleet):
            so_far = self.table[-1].metrics.get("clock", 0.0) if self.table else 0.0
            report |= clock_report(self.job, outcome, t, so_far)
        if self.spending:
            report |= {"epsilon": self.spending.spent(t)}
        return outcome._replace(report=report)

    def is_evaluated(self, t: int) -> bool:
        return t % self.study.evaluate.every == 0 or t == self.last

    def is_saved(self, t: int) -> bool:
        """Whether a checkpoint follows this round."""
        return self.folder is not None and (t % self.study.checkpoint == 0 or t == self.last)

    def start_round(self, t: int) -> tuple[Callable[[], Outcome], str]:
        """Round t: the server after it, what says how it went once it is called, and its pictures."""
        ids = self.job.fleet.cohort(self.study.seed, t, self.clients, self.count)
        shown, views = self.folder is not None and snapshots.is_snapshot_round(t, self.last), []
        if shown:
            rows = _all_rows(self.bank)
            views = snapshots.snapshots_before_round(self.job, rows, self.server, ids, t, self.study.record)
        try:
            self.server, under_way = self.engine.start(self.server, ids, t)
        except BaseException:
            self.release(t, stopping=True)  # what stops the run is said, and may tell of what was noised
            raise
        views += snapshots.snapshots_after_round(self.job, self.server, t) if shown else []
        return under_way, snapshots.snapshot_lines(views)

    def save(self) -> None:
        """A checkpoint of the rounds that are done."""
        assert self.folder is not None
        if self.ranks:
            refuse_other_models(self.ranks, self.server.model, self.done)
        meta: dict[str, Any] = {"round": self.done, "seconds": self.seconds, "identity": self.identity}
        if self.secret and self.releases.table:
            meta |= {"secret": self.secret.commitment, "releases": self.releases.table.mark()}
        if self.owed:
            meta |= {"owed": self.owed.meta()}
        self.folder.save(self.server, self.bank, self.rows, meta, self.owed.tensors() if self.owed else {})

    @property
    def writes(self) -> bool:
        """Whether this process writes the run's files, of those that play it."""
        return self.ranks is None or self.ranks.is_first

    @property
    def asks_clients(self) -> bool:
        """Whether an evaluation shows the model to clients elsewhere."""
        return self.study.engine == "network" and self.study.network.evaluate == "clients"

    def finish(self, result: Result) -> None:
        """Write down what the run came to; its secret is deleted, unless it is to be kept."""
        if self.folder and self.writes:
            if not self.study.keep_secret:
                delete_secret(self.folder.path)
            self.folder.finish(result)

    def close(self) -> None:
        self.bank.close()
        if self.rows:
            self.rows.close()
        if self.scratch:
            self.scratch.cleanup()
        return_freed_memory()


def train_rounds(run: RunState, loggers: Sequence[Logger] = ()) -> Result:
    """Train the rounds that are left."""
    study, began = run.study, time.perf_counter() - run.seconds
    wanted = wanted_evaluation(study.evaluate, run.job)

    def evaluate_early(t: int, under_way: Callable[[], Outcome]) -> Evaluation:
        """Before it is known how the round went; if it went wrong, that is what is said."""
        try:
            return run.engine.evaluate(run.server, t, wanted)
        except Exception:
            under_way()
            raise

    def finish(t: int, under_way: Callable[[], Outcome], pictures: str, evaluation: Evaluation | None = None) -> None:
        """Say how round t went, and keep it."""
        outcome = under_way()
        run.release(t)
        outcome = run.with_costs(t, outcome)
        if run.is_evaluated(t) and evaluation is None:
            if run.asks_clients and run.folder and run.owed is None:
                run.owed = OwedRound(t, outcome, pictures)
                run.save()
            evaluation = run.engine.evaluate(run.server, t, wanted)
            run.owed = None
        record = Record.of(t, outcome, evaluation, time.perf_counter() - began)
        run.table.append(record)
        run.done, run.seconds = t, record.seconds
        if run.folder:
            run.folder.append(t, record, outcome, evaluation, pictures)
            if run.is_saved(t):
                run.save()
        for log in loggers:
            log(record)

    waiting: list[Callable[[], None]] = []  # a round that the GPU may not have finished when the next one starts
    ahead = run.server.device.type == "cuda" and run.secret is None and not run.asks_clients
    if run.owed:
        finish(run.owed.round, lambda owed=run.owed: owed.outcome, run.owed.pictures)
    t = run.done
    try:
        while t < run.last:
            t += 1
            under_way, pictures = run.start_round(t)
            while waiting:
                waiting.pop()()
            marks = evaluate_early(t, under_way) if ahead and run.is_evaluated(t) else None
            waiting.append(partial(finish, t, under_way, pictures, marks))
            if not ahead or run.is_saved(t) or t == run.last:
                waiting.pop()()
    finally:
        while waiting:
            waiting.pop()()
    result = _result_of_run(run)
    run.finish(result)
    return result


def _all_rows(bank: Bank) -> Rows:
    return FetchedRows(bank) if isinstance(bank, RankRows) else bank


def cohort_size(clients: int, sample: int | float) -> int:
    """How many clients a round asks for: a count, or a share of all, rounded."""
    count = sample if isinstance(sample, int) else math.floor(sample * clients + 0.5)
    if count > clients:
        raise ConfigError(f"sample asks for {count} clients a round, but there are {clients}; lower sample")
    if count < 1:
        raise ConfigError(f"sample {sample} of {clients} clients is nobody; raise it to {0.5 / clients:.3g} or more")
    return count


def wanted_evaluation(section: EvaluateSection, job: Job) -> Wanted:
    """Who is looked at: at most so many of the clients that train; also tuned, where the method says how; new ones."""
    training = torch.ones(len(job.task), dtype=torch.bool)
    training[job.task.held_out] = False
    ids = training.nonzero()[:, 0]
    joined = [("after", job.method.local.tune is not None), ("new", len(job.task.held_out) > 0)]
    who = tuple(section.who) + tuple(name for name, asked in joined if asked and name not in section.who)
    return Wanted(ids[_evenly_spread(len(ids), section.clients)], who, section.steps)


def _evenly_spread(clients: int, most: int) -> Tensor:
    """At most so many places, evenly spread over all: the same ones every time."""
    if clients <= most:
        return torch.arange(clients)
    return torch.linspace(0, clients - 1, most, dtype=torch.float64).round().long()


def privacy_account(job: Job, count: int, releases: Releases | None = None) -> PrivacyAccount | None:
    """What the run spends of its clients' privacy, where the method promises any."""
    if job.method.privacy is None:
        return None
    return open_privacy_account(job.method.privacy, job.fleet, len(job.task), count, job.seed, job.rounds, releases)


def _result_of_run(run: RunState) -> Result:
    table, spending, first = run.table, run.spending, run.job.task.metrics[0]
    return Result(
        task=run.job.task.name,
        method="+".join(entry if isinstance(entry, str) else next(iter(entry)) for entry in run.study.method),
        rounds=run.done,
        seed=run.study.seed,
        accuracy=latest_value(table, "accuracy"),
        best_accuracy=highest_accuracy(table),
        personal_accuracy=latest_value(table, "personal_accuracy"),
        worst_decile=latest_value(table, "worst_decile"),
        loss=latest_value(table, "loss"),
        up_bytes=sum(r.up_bytes for r in table),
        down_bytes=sum(r.down_bytes for r in table),
        seconds=table[-1].seconds if table else 0.0,
        model_sha256=tree.tree_sha256(run.server.model),
        table=table,
        model={name: x[0].cpu().clone() for name, x in run.job.network(run.server.model).items()},
        epsilon=spending.spent(run.done) if spending else math.nan,
        stopped=spending.why if spending else "",
        privacy=_privacy_sentence(run),
        ranked_by=first.name,
        higher_is_better=first.higher_is_better,
        score=latest_value(table, first.name),
        personal_score=latest_value(table, f"personal_{first.name}"),
    )


def _privacy_sentence(run: RunState) -> str:
    """For whom epsilon holds; and that a run whose secret is gone cannot be repeated."""
    privacy, gone = run.job.method.privacy, run.secret is not None and not run.study.keep_secret
    said = [privacy_promise(privacy.mode, privacy.secret)] if privacy else []
    return "; ".join([*said, "the secret is deleted, so nobody can repeat this run"] if gone else said)
