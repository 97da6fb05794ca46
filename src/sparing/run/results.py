"""What a run leaves behind: a record per round, a summary, and the same as attributes."""

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sparing.engines.engine import Evaluation, Outcome


@dataclass(frozen=True)
class Record:
    """One round: a row of rounds.csv. Loggers are functions `(Record) -> None`."""

    round: int
    accuracy: float  # of the global model on all test samples; NaN in rounds that were not evaluated
    loss: float
    personal_accuracy: float  # mean over clients of their own model on their own test samples
    worst_decile: float  # the same over the worst tenth of the clients
    train_loss: float  # sample-weighted over the cohort
    clients: int
    up_bytes: int
    down_bytes: int
    coverage: float  # share of the parameters somebody voted on
    seconds: float

    @classmethod
    def of(cls, t: int, outcome: Outcome, evaluation: Evaluation | None, seconds: float) -> "Record":
        nan = float("nan")
        own = evaluation.own_accuracy if evaluation else torch.zeros(0)
        return cls(
            round=t,
            accuracy=evaluation.accuracy if evaluation else nan,
            loss=evaluation.loss if evaluation else nan,
            personal_accuracy=float(own.double().mean()) if len(own) else nan,
            worst_decile=worst_decile(own),
            train_loss=float((outcome.loss.double() * outcome.n).sum() / outcome.n.sum()),
            clients=len(outcome.ids),
            up_bytes=sum(int(x.sum()) for x in outcome.up.values()),
            down_bytes=sum(int(x.sum()) for x in outcome.down.values()),
            coverage=outcome.report.get("coverage", nan),
            seconds=seconds,
        )


COLUMNS = [field.name for field in fields(Record)]
WHOLE = {field.name for field in fields(Record) if field.type in (int, "int")}


def worst_decile(accuracy: Tensor) -> float:
    """Mean over the worst tenth of the clients, at least one of them."""
    if not len(accuracy):
        return float("nan")
    worst = accuracy.double().sort().values[: max(1, math.floor(len(accuracy) / 10 + 0.5))]
    return float(worst.mean())


def row_text(record: Record) -> str:
    return ",".join("" if value != value else repr(value) for value in asdict(record).values()) + "\n"


def row_read(text: str) -> Record:
    cells = dict(zip(COLUMNS, text.strip().split(","), strict=True))
    return Record(**{k: int(v) if k in WHOLE else float(v) if v else float("nan") for k, v in cells.items()})  # type: ignore[arg-type]


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
    table: list[Record]
    model: dict[str, Tensor]  # the trained global model, as a state_dict

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json holds; NaN, where there was nothing to measure, becomes None."""
        names = [f.name for f in fields(self) if f.name not in ("table", "model")]
        values = {name: getattr(self, name) for name in names}
        return {name: None if value != value else value for name, value in values.items()}


def best(table: list[Record]) -> float:
    return max((r.accuracy for r in table if r.accuracy == r.accuracy), default=float("nan"))


def last(table: list[Record], name: str) -> float:
    """The latest measured value of a column."""
    return next((v for r in reversed(table) if (v := getattr(r, name)) == v), float("nan"))
