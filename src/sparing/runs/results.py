"""What a run leaves behind: a record per round, a summary, and the same as attributes."""

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.engines.engine import TRAIN_LOSS, Evaluation, Outcome
from sparing.runs.tables import frame_of
from sparing.train.metrics import jain, weighted_mean, worst_decile


@dataclass(frozen=True)
class Record:
    """One round: a row of rounds.csv. What was not measured is NaN. Loggers are functions `(Record) -> None`.

    "Personal" is the model a client would start the next round from, on its own test samples.
    """

    round: int
    accuracy: float  # of the global model on all test samples
    loss: float
    auc: float
    personal_accuracy: float  # mean over clients
    personal_weighted: float  # mean over their test samples
    worst_decile: float  # mean over the worst tenth of the clients
    variance: float  # between clients
    jain: float  # 1 where all fare alike
    benefit: float  # personal accuracy less the global model's, on the same samples, mean over clients
    after_accuracy: float  # after another round of local training
    met_accuracy: float  # personal, of seen clients: those that have taken part
    unmet_accuracy: float  # and of unseen ones
    new_accuracy: float  # of clients held out of training, after a few local steps
    train_loss: float  # sample-weighted over the cohort
    clients: int  # that arrived
    up_bytes: int
    down_bytes: int
    coverage: float  # share of the parameters somebody voted on
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)  # of the task and the method: rows of metrics.csv

    @classmethod
    def of(cls, t: int, outcome: Outcome, evaluation: Evaluation | None, seconds: float) -> "Record":
        return cls(
            round=t,
            **(_evaluation_columns(evaluation) if evaluation else dict.fromkeys(_MEASURED_COLUMNS, math.nan)),
            train_loss=outcome.report.get(TRAIN_LOSS, _mean_training_loss(outcome)),
            clients=int(outcome.arrived.sum()),
            up_bytes=sum(int(x.sum()) for x in outcome.up.values()),
            down_bytes=sum(int(x.sum()) for x in outcome.down.values()),
            coverage=outcome.report.get("coverage", math.nan),
            seconds=seconds,
            metrics={name: value for name, value in outcome.report.items() if name not in ("coverage", TRAIN_LOSS)}
            | (_asked_columns(evaluation) if evaluation else {}),
        )


def _mean_training_loss(outcome: Outcome) -> float:
    """Over all who said one: of clients that a round left out nothing is known."""
    heard = outcome.arrived | ~outcome.loss.isnan()
    return weighted_mean(outcome.loss[heard], outcome.n[heard])


def _evaluation_columns(evaluation: Evaluation) -> dict[str, float]:
    """The columns that come from an evaluation."""
    own, plain, nobody = evaluation.marks.get("before"), evaluation.marks.get("global"), torch.zeros(0)
    a, met = (own.accuracy, own.met) if own else (nobody, nobody.bool())
    after, new = evaluation.marks.get("after"), evaluation.marks.get("new")
    return {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "auc": evaluation.auc,
        "personal_accuracy": weighted_mean(a),
        "personal_weighted": weighted_mean(a, own.samples) if own else math.nan,
        "worst_decile": worst_decile(a),
        "variance": float(a.var(correction=0)) if len(a) else math.nan,
        "jain": jain(a),
        "benefit": weighted_mean(a - plain.accuracy) if own and plain else math.nan,
        "after_accuracy": weighted_mean(after.accuracy) if after else math.nan,
        "met_accuracy": weighted_mean(a[met]),
        "unmet_accuracy": weighted_mean(a[~met]),
        "new_accuracy": weighted_mean(new.accuracy) if new else math.nan,
    }


def _asked_columns(evaluation: Evaluation) -> dict[str, float]:
    """The metrics that a task asks for, of the global model and, as a mean over clients, of theirs."""
    columns = {name: value for name, value in evaluation.asked.items() if name not in ROUND_COLUMNS}
    for kind, who in (("personal", "before"), ("after", "after"), ("new", "new")):
        if who in evaluation.marks:
            columns |= {f"{kind}_{name}": float(x.nanmean()) for name, x in evaluation.marks[who].asked.items()}
    return columns


ROUND_COLUMNS = [field.name for field in fields(Record) if field.name != "metrics"]
_MEASURED_COLUMNS = ROUND_COLUMNS[ROUND_COLUMNS.index("accuracy") : ROUND_COLUMNS.index("train_loss")]
INTEGER_COLUMNS = {field.name for field in fields(Record) if field.type in (int, "int")}


def round_row(record: Record) -> str:
    values = [getattr(record, name) for name in ROUND_COLUMNS]
    return ",".join("" if value != value else repr(value) for value in values) + "\n"


def read_round_row(text: str, said: dict[int, dict[str, float]]) -> Record:
    cells = dict(zip(ROUND_COLUMNS, text.strip().split(","), strict=True))
    values: dict[str, Any] = {
        k: int(v) if k in INTEGER_COLUMNS else float(v) if v else math.nan for k, v in cells.items()
    }
    return Record(**values, metrics=said.get(values["round"], {}))


METRICS_HEADER = "round,metric,value\n"


def metric_rows(record: Record) -> str:
    """What the method itself reported, ready to append to metrics.csv."""
    return "".join(f"{record.round},{name},{value!r}\n" for name, value in record.metrics.items())


def read_metric_rows(text: str) -> dict[int, dict[str, float]]:
    said: dict[int, dict[str, float]] = {}
    for line in text.splitlines()[1:]:
        t, name, value = line.split(",")
        said.setdefault(int(t), {})[name] = float(value)
    return said


@dataclass(frozen=True)
class Result:
    """The fields of summary.json as attributes, and the table of rounds."""

    task: str
    method: str
    rounds: int
    seed: int
    accuracy: float
    best_accuracy: float
    personal_accuracy: float
    worst_decile: float
    loss: float
    up_bytes: int
    down_bytes: int
    seconds: float
    model_sha256: str
    table: list[Record] = field(repr=False)
    model: dict[str, Tensor] = field(repr=False)  # the trained global model, as a state_dict
    epsilon: float = math.nan  # what was spent of the clients' privacy, where the method counts it
    stopped: str = ""  # why the run ended before its last round
    privacy: str = ""  # for whom epsilon holds
    ranked_by: str = "accuracy"  # the task's first metric, which tables rank by
    higher_is_better: bool = True  # of that
    score: float = math.nan  # that metric, of the global model
    personal_score: float = math.nan  # and of the clients' own, mean over clients

    def frame(self) -> Any:
        """The table of rounds, metrics included: a pandas DataFrame where pandas is installed, else a list of dicts."""
        rows = [asdict(record) for record in self.table]
        return frame_of([{**{k: v for k, v in row.items() if k != "metrics"}, **row["metrics"]} for row in rows])

    def metric(self, name: str) -> list[float]:
        """One number a round of another metric, or of what the method itself reports; NaN where there is none."""
        return [record.metrics.get(name, math.nan) for record in self.table]

    def rounds_to(self, value: float) -> float:
        """Rounds until the global model first was so good by the metric that tables rank by; NaN if it never was."""
        return rounds_to_target(self.table, self._target(value))

    def bytes_to(self, value: float) -> float:
        """Bytes up and down until then."""
        return bytes_to_target(self.table, self._target(value))

    def time_to(self, value: float) -> float:
        """Seconds of the virtual clock until then; NaN also where the fleet declares no rates."""
        return seconds_to_target(self.table, self._target(value))

    def _target(self, value: float) -> "Target":
        return Target(value, self.ranked_by, self.higher_is_better)

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json holds; what is not finite, as where there was nothing to measure, becomes None."""
        private = ("privacy",) if self.privacy else ()
        private = ("epsilon", "stopped", *private) if self.epsilon == self.epsilon else private
        ranked = ("ranked_by", "higher_is_better", "score", "personal_score")
        aside = {"table", "model", "epsilon", "stopped", "privacy"} - set(private)
        aside |= set(ranked) if self.ranked_by == "accuracy" else set()
        names = [f.name for f in fields(self) if f.name not in aside]
        values = {name: getattr(self, name) for name in names}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def highest_accuracy(table: list[Record]) -> float:
    return best_value(table, "accuracy")


def best_value(table: list[Record], name: str, higher_is_better: bool = True) -> float:
    """The largest value of a column or metric, or the smallest where lower is better; NaN where there is none."""
    values = [value for r in table if (value := record_value(r, name)) == value]
    return (max if higher_is_better else min)(values, default=math.nan)


def latest_value(table: list[Record], name: str) -> float:
    """The latest measured value of a column, or of a metric."""
    values = (record_value(r, name) for r in reversed(table))
    return next((v for v in values if v == v), float("nan"))


def record_value(record: Record, name: str) -> float:
    return getattr(record, name) if name in ROUND_COLUMNS else record.metrics.get(name, math.nan)


class Target(NamedTuple):
    """What the global model is to reach: so much of a metric, or so little where lower is better."""

    value: float
    metric: str = "accuracy"
    higher_is_better: bool = True

    def is_reached(self, record: Record) -> bool:
        seen = record_value(record, self.metric)
        return seen >= self.value if self.higher_is_better else seen <= self.value


def _rounds_until(table: list[Record], target: Target) -> list[Record]:
    """The rounds up to the first that reaches it; none if none does."""
    reached = next((i for i, r in enumerate(table, 1) if target.is_reached(r)), 0)
    return table[:reached]


def rounds_to_target(table: list[Record], target: Target) -> float:
    return float(rounds[-1].round) if (rounds := _rounds_until(table, target)) else math.nan


def bytes_to_target(table: list[Record], target: Target) -> float:
    """Up and down together."""
    rounds = _rounds_until(table, target)
    return float(sum(r.up_bytes + r.down_bytes for r in rounds)) if rounds else math.nan


def seconds_to_target(table: list[Record], target: Target) -> float:
    return rounds[-1].metrics.get("clock", math.nan) if (rounds := _rounds_until(table, target)) else math.nan


_CLIENT_COLUMNS = ("round", "client", "who", "samples", "accuracy", "loss", "auc")


def clients_header(ranked_by: str = "accuracy") -> str:
    """The first line of clients.csv; what tables rank by has a column there.

    >>> clients_header("mse")
    'round,client,who,samples,accuracy,loss,auc,mse\\n'
    """
    return ",".join(dict.fromkeys((*_CLIENT_COLUMNS, ranked_by))) + "\n"


def client_rows(t: int, evaluation: Evaluation, header: str) -> str:
    """The rows of one evaluation, ready to append to clients.csv."""
    lines, more = [], header.strip().split(",")[len(_CLIENT_COLUMNS) :]
    for who, marks in evaluation.marks.items():
        columns = [*marks[:5], *(marks.asked[name] for name in more)]
        for i, n, *values in zip(*(x.tolist() for x in columns), strict=True):
            lines.append(f"{t},{i},{who},{n}," + ",".join("" if v != v else repr(v) for v in values) + "\n")
    return "".join(lines)
