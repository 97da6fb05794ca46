"""The run folder: config.yaml, environment.json, log.txt, summary.json, checkpoint.safetensors, clients.slots, and
five tables.

rounds.csv has a row per round, ledger.csv one per round, client and direction, clients.csv one per round, client and
kind of model evaluated, metrics.csv one per round and thing that the method itself reports, pictures.jsonl a line per
picture (`run/pictures.py`). They grow by appending; a checkpoint records how long they were, and resuming cuts them
back to that, so that tables, model and state always tell of the same round.
"""

import os
from pathlib import Path
from typing import Any

import yaml

from sparing.core.errors import CheckpointError, ConfigError
from sparing.core.round import Server
from sparing.core.tree import Tree, prefixed, under
from sparing.engines.engine import Evaluation, Outcome
from sparing.run import checkpoint, ledger
from sparing.run.bank import Bank
from sparing.run.config import read_yaml
from sparing.run.environment import environment
from sparing.run.files import write_atomic, write_json
from sparing.run.results import (
    COLUMNS,
    MARKS_HEADER,
    METRICS_HEADER,
    Record,
    Result,
    marks_text,
    metrics_read,
    metrics_text,
    row_read,
    row_text,
)

CONFIG, ROUNDS, LEDGER, SUMMARY = "config.yaml", "rounds.csv", "ledger.csv", "summary.json"
ENVIRONMENT, LOG = "environment.json", "log.txt"
FAILED = "failed.txt"  # of a run in a sweep: why training broke down
CLIENTS = "clients.csv"
METRICS = "metrics.csv"
PICTURES = "pictures.jsonl"
TABLES = (ROUNDS, LEDGER, CLIENTS, METRICS, PICTURES)
CHECKPOINT, SLOTS, SERVER_SLOTS = "checkpoint.safetensors", "clients.slots", "server.slots"


class Folder:
    """Where one run is written."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: str | Path, config: dict[str, Any]) -> "Folder":
        """A new folder; one that already holds a run, or folders of runs, is left alone."""
        path = Path(path)
        if any((path / name).exists() for name in (CONFIG, CHECKPOINT, SLOTS)):
            raise ConfigError(
                f"{path} already holds a run; continue it with `sparing resume {path}` or choose another folder"
            )
        if inner := next(iter(sorted(path.glob(f"*/{CONFIG}"))), None):
            raise ConfigError(
                f"{path} holds run folders such as {inner.parent.name}; choose a folder in it or elsewhere"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {path} ({error.strerror}); choose another folder") from None
        folder = cls(path)
        write_json(path / ENVIRONMENT, environment(config["device"]))
        folder.empty_tables()
        # Last: who sees it takes this for a run, and may read it at once.
        write_atomic(path / CONFIG, yaml.safe_dump(config, sort_keys=False).encode())
        return folder

    @classmethod
    def open(cls, path: str | Path) -> tuple["Folder", dict[str, Any]]:
        """An existing run and its config."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path} holds no run: there is no {CONFIG} in it; check the path")
        return cls(path), read_yaml(path / CONFIG)

    def empty_tables(self) -> None:
        (self.path / ROUNDS).write_text(",".join(COLUMNS) + "\n")
        (self.path / LEDGER).write_text(ledger.HEADER)
        (self.path / CLIENTS).write_text(MARKS_HEADER)
        (self.path / METRICS).write_text(METRICS_HEADER)
        (self.path / PICTURES).write_text("")

    def append(self, t: int, record: Record, outcome: Outcome, evaluation: Evaluation | None, views: str = "") -> None:
        with open(self.path / ROUNDS, "a") as file:
            file.write(row_text(record))
        with open(self.path / LEDGER, "a") as file:
            file.write(ledger.ledger_text(t, outcome))
        with open(self.path / METRICS, "a") as file:
            file.write(metrics_text(record))
        with open(self.path / PICTURES, "a") as file:
            file.write(views)
        if evaluation:
            with open(self.path / CLIENTS, "a") as file:
                file.write(marks_text(t, evaluation))

    def save(self, server: Server, bank: Bank, rows: Bank | None, meta: dict[str, Any]) -> None:
        """One durable checkpoint of the server, the clients and the length of the tables."""
        tables = {name: synced_size(self.path / name) for name in TABLES}
        tensors = (
            prefixed("model", server.model)
            | prefixed("share", server.share)
            | prefixed("blend", server.blend)
            | prefixed("fit", server.fit)
            | prefixed("past", server.past)
            | {"seen": server.seen}
            | prefixed("bank", bank.state())
            | prefixed("rows", rows.state() if rows else {})
        )
        checkpoint.save(self.path / CHECKPOINT, tensors, {**meta, "tables": tables})
        bank.committed()
        if rows:
            rows.committed()

    def load(self, fingerprint: str, every: int) -> tuple[Server, Tree, Tree, dict[str, Any]] | None:
        """(server, bank, server's rows, meta) of the last checkpoint, the tables cut back to it; None if none."""
        if not (self.path / CHECKPOINT).exists():
            if self.rounds_written() >= every:
                raise CheckpointError(
                    f"{self.path / CHECKPOINT} is missing, though {ROUNDS} tells of rounds after the first checkpoint; "
                    "put it back, or start a new run in another folder"
                )
            self.empty_tables()
            return None
        tensors, meta = checkpoint.load(self.path / CHECKPOINT)
        if meta["fingerprint"] != fingerprint:
            raise CheckpointError(
                f"{self.path / CHECKPOINT} belongs to another config than {self.path / CONFIG}; "
                "undo the change to config.yaml (or to the task), or start a new run in another folder"
            )
        self.cut(meta["tables"])
        parts = ("model", "share", "blend", "fit", "past")
        model, share, blend, fit, past = (under(part, tensors) for part in parts)
        server = Server(model, share, blend, fit, tensors["seen"], past=past)
        return server, under("bank", tensors), under("rows", tensors), meta

    def rounds_written(self) -> int:
        path = self.path / ROUNDS
        return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0

    def cut(self, tables: dict[str, int]) -> None:
        for name, size in tables.items():
            path = self.path / name
            if not path.exists() or path.stat().st_size < size:
                raise CheckpointError(
                    f"{path} is shorter than the checkpoint says ({size} bytes); restore it from a copy"
                )
            os.truncate(path, size)

    def records(self, rounds: int) -> list[Record]:
        """The table so far, which must have one row for every round."""
        path = self.path / ROUNDS
        try:
            said = metrics_read((self.path / METRICS).read_text())
            table = [row_read(line, said) for line in path.read_text().splitlines()[1:]]
        except (ValueError, TypeError):
            table = []
        if [record.round for record in table] != list(range(1, rounds + 1)):
            raise CheckpointError(
                f"{path} does not hold rounds 1 to {rounds} as they were written; restore it from a copy"
            )
        return table

    def finish(self, result: Result) -> None:
        write_json(self.path / SUMMARY, result.summary)


def synced_size(path: Path) -> int:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return file.seek(0, os.SEEK_END)
