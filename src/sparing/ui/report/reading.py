"""What a report reads of run folders beside what `sparing compare` reads."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparing.core.errors import ConfigError
from sparing.run.folder import CLIENTS, LEDGER, PICTURES
from sparing.run.gather import Group, Kept, whole_lines
from sparing.run.ledger import KINDS
from sparing.run.pictures import Picture


class Seen(NamedTuple):
    """One run, as its folder tells it."""

    run: Kept
    pictures: list[Picture]
    sent: dict[str, list[int]]  # direction -> bytes by kind, all rounds together
    marks: dict[str, list[float]]  # kind of model -> accuracy of each client at the last evaluation


class Members(NamedTuple):
    """Runs that differ in nothing but the seed."""

    label: str
    seen: list[Seen]
    tint: int


def members(groups: list[Group]) -> list[Members]:
    return [Members(group.label, [seen(run) for run in group.runs], i) for i, group in enumerate(groups)]


def seen(run: Kept) -> Seen:
    last = len(run.table)
    return Seen(run, pictures(run.folder, last), sent(run.folder, last), marks(run.folder, last))


def lines(path: Path) -> list[str]:
    return whole_lines(path).splitlines() if path.is_file() else []


def pictures(folder: Path, last: int) -> list[Picture]:
    found: list[Picture] = []
    for i, line in enumerate(lines(folder / PICTURES)):
        try:
            picture = json.loads(line)
            if picture["kind"] and picture["round"] <= last:
                found.append(picture)
        except (ValueError, TypeError, KeyError):
            raise damaged(folder / PICTURES, i) from None
    return found


def damaged(path: Path, i: int) -> ConfigError:
    """Of the line after i others."""
    return ConfigError(
        f"{path} is not as it was written, see line {i + 1}; restore it from a copy, or leave this run out"
    )


def missing(runs: Sequence[Kept]) -> list[str]:
    """Files a report looks for that are not there."""
    gone = [run.folder / CLIENTS for run in runs if not (run.folder / CLIENTS).is_file()]
    return [f"{path} is missing: the clients of this run are not shown" for path in gone]


def sent(folder: Path, last: int) -> dict[str, list[int]]:
    total = {"up": [0] * len(KINDS), "down": [0] * len(KINDS)}
    for i, line in enumerate(lines(folder / LEDGER)[1:], 1):
        try:
            t, _, way, *cells = line.split(",")
            if int(t) <= last:
                total[way] = [a + int(b) for a, b in zip(total[way], cells, strict=True)]
        except (ValueError, KeyError):
            raise damaged(folder / LEDGER, i) from None
    return total


def marks(folder: Path, last: int) -> dict[str, list[float]]:
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for i, line in enumerate(lines(folder / CLIENTS)[1:], 1):
        try:
            t, _, who, _, accuracy, *_ = line.split(",")
            if int(t) <= last and accuracy:
                found[who][int(t)].append(float(accuracy))
        except ValueError:
            raise damaged(folder / CLIENTS, i) from None
    return {who: rounds[max(rounds)] for who, rounds in found.items()}


def over_seeds(group: Members, column: str) -> tuple[list[int], np.ndarray]:
    """Rounds in which every seed has this number, and [seeds, rounds]: a column of rounds.csv, or a metric."""

    def value(record: Any) -> float:
        return getattr(record, column) if hasattr(record, column) else record.metrics.get(column, np.nan)

    values = np.array([[value(record) for record in one.run.table] for one in group.seen], dtype=float)
    rounds = np.flatnonzero(~np.isnan(values).any(axis=0)) if values.size else np.zeros(0, int)
    return (rounds + 1).tolist(), values[:, rounds]


def spread(values: np.ndarray) -> list[float] | None:
    """The standard deviation over seeds; of one seed there is none."""
    return values.std(axis=0, ddof=1).tolist() if len(values) > 1 else None
