"""The run folder: config.yaml, environment.json, log.txt, summary.json, checkpoint.safetensors, clients.slots, and
five tables.

rounds.csv has a row per round, ledger.csv one per round, client and direction, clients.csv one per round, client and
kind of model evaluated, metrics.csv one per round and thing that the method itself reports, pictures.jsonl a line per
picture (`run/pictures.py`). They grow by appending; a checkpoint records how long they were and their digests
(`run/tables.py`), and resuming cuts them back to that, so that tables, model and state always tell of the same round.

config.yaml is written last when a folder is made, after a checkpoint of round 0: a folder with a config is a run that
can be resumed, whatever happens from then on. A folder is written by one process at a time (`run/lock.py`).
"""

import json
from pathlib import Path
from typing import Any

import yaml

from sparing.core.errors import CheckpointError, ConfigError
from sparing.core.grid import limits_of
from sparing.core.round import Server
from sparing.core.tree import Tree, prefixed, under
from sparing.engines.engine import Evaluation, Outcome
from sparing.run import checkpoint, ledger
from sparing.run.bank import Bank
from sparing.run.config import read_yaml
from sparing.run.environment import environment
from sparing.run.files import write_atomic, write_json, writing
from sparing.run.lock import Lock
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
from sparing.run.tables import Mark, Table, verified

CONFIG, ROUNDS, LEDGER, SUMMARY = "config.yaml", "rounds.csv", "ledger.csv", "summary.json"
ENVIRONMENT, LOG = "environment.json", "log.txt"
FAILED = "failed.txt"  # of a run in a sweep: why training broke down
CLIENTS = "clients.csv"
METRICS = "metrics.csv"
PICTURES = "pictures.jsonl"
HEADERS = {
    ROUNDS: ",".join(COLUMNS) + "\n",
    LEDGER: ledger.HEADER,
    CLIENTS: MARKS_HEADER,
    METRICS: METRICS_HEADER,
    PICTURES: "",
}
CHECKPOINT, SLOTS, SERVER_SLOTS = "checkpoint.safetensors", "clients.slots", "server.slots"


class Folder:
    """Where one run is written, by this process alone until it is closed."""

    def __init__(self, path: Path):
        self.path, self.lock = path, Lock(path)
        self.tables = {name: Table(path / name) for name in HEADERS}
        self.beside = {name: Table(path / name) for name in (ENVIRONMENT, LOG)}  # vouched for, but never cut

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        self.lock.release()

    @classmethod
    def create(cls, path: str | Path, device: str) -> "Folder":
        """A new folder, not yet a run; one that already holds a run, or folders of runs, is left alone."""
        path = Path(path)
        refuse_taken(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {path} ({error.strerror}); choose another folder") from None
        folder = cls(path)
        try:
            refuse_taken(path)  # once more, now that nobody else can change it
            with writing(path):
                write_json(path / ENVIRONMENT, environment(device))
            for name, header in HEADERS.items():
                folder.tables[name].create(header)
            folder.beside[LOG].create()
            folder.beside[ENVIRONMENT].follow()
        except BaseException:
            folder.close()
            raise
        return folder

    def publish(self, config: dict[str, Any]) -> None:
        """From here on it is a run."""
        with writing(self.path / CONFIG):
            write_atomic(self.path / CONFIG, yaml.safe_dump(config, sort_keys=False).encode())

    @classmethod
    def open(cls, path: str | Path) -> "Folder":
        """An existing run, to go on with."""
        config_of(path)
        return cls(Path(path))

    def append(self, t: int, record: Record, outcome: Outcome, evaluation: Evaluation | None, views: str = "") -> None:
        self.lock.check()
        self.tables[ROUNDS].append(row_text(record))
        self.tables[LEDGER].append(ledger.ledger_text(t, outcome))
        self.tables[METRICS].append(metrics_text(record))
        self.tables[PICTURES].append(views)
        if evaluation:
            self.tables[CLIENTS].append(marks_text(t, evaluation))

    def save(self, server: Server, bank: Bank, rows: Bank | None, meta: dict[str, Any]) -> None:
        """One durable checkpoint of the server, the clients, and the length and digest of every table."""
        self.lock.check()
        self.beside[LOG].follow()
        marks = {name: table.mark() for name, table in (self.tables | self.beside).items()}
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
        checkpoint.save(self.path / CHECKPOINT, tensors, {**meta, "files": marks})
        bank.committed()
        if rows:
            rows.committed()

    def load(self) -> tuple[Tree, dict[str, Any]]:
        """The tensors and the meta of the last checkpoint; every file is as it says, but nothing is cut yet."""
        tensors, meta = checkpoint.load(self.path / CHECKPOINT)
        for name, table in (self.tables | self.beside).items():
            table.restore(meta["files"][name])
        if (self.path / ENVIRONMENT).stat().st_size != self.beside[ENVIRONMENT].size:
            raise CheckpointError(f"{self.path / ENVIRONMENT} was altered after it was written; restore it from a copy")
        return tensors, meta

    def cut(self) -> None:
        """Drop the rounds that came after the checkpoint: they will be trained again."""
        for table in self.tables.values():
            table.cut()

    def records(self, rounds: int) -> list[Record]:
        """The table so far, which must have one row for every round."""
        path, size = self.path / ROUNDS, self.tables[ROUNDS].size
        said = metrics_read((self.path / METRICS).read_bytes()[: self.tables[METRICS].size].decode())
        table = [row_read(line, said) for line in path.read_bytes()[:size].decode().splitlines()[1:]]
        if [record.round for record in table] != list(range(1, rounds + 1)):
            raise CheckpointError(f"{path} does not hold rounds 1 to {rounds}; restore it from a copy")
        return table

    def finish(self, result: Result) -> None:
        self.lock.check()
        with writing(self.path / SUMMARY):
            write_json(self.path / SUMMARY, result.summary)


def config_of(path: str | Path) -> dict[str, Any]:
    """The config of the run in a folder, which anybody may read."""
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{path} holds no run: there is no {CONFIG} in it; check the path")
    return read_yaml(path / CONFIG)


def server_of(tensors: Tree) -> Server:
    """The server as a checkpoint has it."""
    model, share, blend, fit, past = (under(part, tensors) for part in ("model", "share", "blend", "fit", "past"))
    return Server(model, share, blend, fit, tensors["seen"], limits_of(model), past=past)


def refuse_taken(path: Path) -> None:
    """A folder that holds a run, a part of one, or folders of runs. What a broken-off start left is no run yet."""
    if (path / CONFIG).exists():
        raise ConfigError(
            f"{path} already holds a run; continue it with `sparing resume {path}` or choose another folder"
        )
    if inner := next(iter(sorted(path.glob(f"*/{CONFIG}"))), None):
        raise ConfigError(f"{path} holds run folders such as {inner.parent.name}; choose a folder in it or elsewhere")
    if part := trained_part(path):
        raise ConfigError(
            f"{path} holds {part} of a run, but no {CONFIG}; bring that back to resume it, or choose another folder"
        )


def trained_part(path: Path) -> str | None:
    """A file that rounds of training have left."""
    for name in (SLOTS, SERVER_SLOTS, SUMMARY):
        if (path / name).exists():
            return name
    for name, header in HEADERS.items():
        if (path / name).is_file() and (path / name).stat().st_size > len(header):
            return name
    return CHECKPOINT if saved_round(path) else None


def meta_of(path: Path) -> dict[str, Any] | None:
    """The meta of a folder's checkpoint, of which only the header is read; None where there is none."""
    if not (path / CHECKPOINT).is_file():
        return None
    with open(path / CHECKPOINT, "rb") as file:
        return json.loads(checkpoint.verified_head(file, path / CHECKPOINT)["__metadata__"]["meta"])


def saved_round(path: Path) -> int:
    """The round of the last checkpoint; 0 before the first, and where there is none."""
    meta = meta_of(path)
    return meta["round"] if meta else 0


def refuse_altered(path: Path, fingerprint: str) -> None:
    """A study or tables that are not as they were written, where a checkpoint vouches for them."""
    meta = meta_of(path) or {}
    if meta.get("identity", {}).get("study", fingerprint) != fingerprint:
        raise CheckpointError(f"{path / CONFIG} was altered after it was written; restore it from a copy")
    marks: dict[str, Mark] = meta.get("files", {})
    for name in HEADERS:
        if name in marks and (path / name).exists():  # who needs one that is missing says so
            verified(path / name, marks[name])
