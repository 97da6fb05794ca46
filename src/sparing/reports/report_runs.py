"""What a report reads of run folders beside what `sparing compare` reads."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparing.core.errors import ConfigError
from sparing.reports.arrangement import ranking_of_task
from sparing.reports.ranking import Ranking
from sparing.reports.run_folders import RunGroup, StoredRun, read_whole_lines
from sparing.runs.files.ledger import ALL_BYTE_KINDS, ledger_header
from sparing.runs.files.run_folder import CLIENTS_FILE, LEDGER_FILE, PICTURES_FILE
from sparing.runs.snapshots import Snapshot


class RunContents(NamedTuple):
    """One run, as its folder tells it."""

    run: StoredRun
    pictures: list[Snapshot]
    sent: dict[str, list[int]]  # direction -> bytes by kind, all rounds together
    marks: dict[str, list[float]]  # kind of model -> value of each client at the last evaluation


class GroupContents(NamedTuple):
    """Runs that differ in nothing but the seed."""

    label: str
    seen: list[RunContents]
    tint: int
    ranking: Ranking = Ranking()  # its task's


def read_groups(groups: list[RunGroup]) -> list[GroupContents]:
    """The groups of one task, its baseline first."""
    ranking = ranking_of_task(groups)
    return [
        GroupContents(group.label, [_read_run(run, ranking) for run in group.runs], i, ranking)
        for i, group in enumerate(groups)
    ]


def _read_run(run: StoredRun, ranking: Ranking) -> RunContents:
    last = len(run.table)
    return RunContents(
        run,
        _read_snapshots(run.folder, last),
        _read_sent_bytes(run.folder, last),
        _read_client_values(run.folder, last, ranking.metric),
    )


def _file_lines(path: Path) -> list[str]:
    return read_whole_lines(path).splitlines() if path.is_file() else []


def _read_snapshots(folder: Path, last: int) -> list[Snapshot]:
    found: list[Snapshot] = []
    for i, line in enumerate(_file_lines(folder / PICTURES_FILE)):
        try:
            picture = json.loads(line)
            if picture["kind"] and picture["round"] <= last:
                found.append(picture)
        except (ValueError, TypeError, KeyError):
            raise _damaged_line(folder / PICTURES_FILE, i) from None
    return found


def _damaged_line(path: Path, i: int) -> ConfigError:
    """Of the line after i others."""
    return ConfigError(
        f"{path} is not as it was written, see line {i + 1}; restore it from a copy, or leave this run out"
    )


def missing_file_notes(runs: Sequence[StoredRun]) -> list[str]:
    """Files a report looks for that are not there."""
    gone = [run.folder / CLIENTS_FILE for run in runs if not (run.folder / CLIENTS_FILE).is_file()]
    return [f"{path} is missing: the clients of this run are not shown" for path in gone]


def _read_sent_bytes(folder: Path, last: int) -> dict[str, list[int]]:
    head, *lines = _file_lines(folder / LEDGER_FILE) or [""]
    secure = head.strip() == ledger_header(secure=True).strip()
    columns, kinds = len(ledger_header(secure).split(",")) - 3, len(ALL_BYTE_KINDS)
    total = {"up": [0] * columns, "down": [0] * columns}
    for i, line in enumerate(lines, 1):
        try:
            t, _, way, *cells = line.split(",")
            if int(t) <= last:
                total[way] = [a + int(b) for a, b in zip(total[way], cells, strict=True)]
        except (ValueError, KeyError):
            raise _damaged_line(folder / LEDGER_FILE, i) from None
    return {way: (found + [0] * kinds)[:kinds] for way, found in total.items()}


def _read_client_values(folder: Path, last: int, metric: str) -> dict[str, list[float]]:
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    head, *lines = _file_lines(folder / CLIENTS_FILE) or [""]
    if metric not in head.split(","):
        return {}
    place = head.split(",").index(metric)
    for i, line in enumerate(lines, 1):
        try:
            cells = line.split(",")
            t, _, who, value = *cells[:3], cells[place]
            if int(t) <= last and value:
                found[who][int(t)].append(float(value))
        except (ValueError, IndexError):
            raise _damaged_line(folder / CLIENTS_FILE, i) from None
    return {who: rounds[max(rounds)] for who, rounds in found.items()}


def values_over_seeds(group: GroupContents, column: str) -> tuple[list[int], np.ndarray]:
    """Rounds in which every seed has this number, and [seeds, rounds]: a column of rounds.csv, or a metric."""

    def value(record: Any) -> float:
        return getattr(record, column) if hasattr(record, column) else record.metrics.get(column, np.nan)

    values = np.array([[value(record) for record in one.run.table] for one in group.seen], dtype=float)
    rounds = np.flatnonzero(~np.isnan(values).any(axis=0)) if values.size else np.zeros(0, int)
    return (rounds + 1).tolist(), values[:, rounds]


def std_over_seeds(values: np.ndarray) -> list[float] | None:
    """The standard deviation over seeds; of one seed there is none."""
    return values.std(axis=0, ddof=1).tolist() if len(values) > 1 else None
