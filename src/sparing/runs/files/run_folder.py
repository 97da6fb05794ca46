"""The run folder: config.yaml, environment.json, log.txt, summary.json, checkpoint.safetensors, clients.slots, and
five tables.

rounds.csv has a row per round, ledger.csv one per round, client and direction, clients.csv one per round, client and
kind of model evaluated, metrics.csv one per round and thing that the method itself reports, pictures.jsonl a line per
picture (`runs/snapshots.py`). They grow by appending; a checkpoint records how long they were and their digests
(`runs/files/growing_tables.py`), and resuming cuts them back to that, so that tables, model and state always
tell of the same round.

config.yaml is written last when a folder is made, after a checkpoint of round 0: a folder with a config is a run that
can be resumed, whatever happens from then on. A folder is written by one process at a time (`runs/files/lock.py`).
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
from sparing.runs.environment import describe_environment
from sparing.runs.files import checkpoint, ledger
from sparing.runs.files.growing_tables import GrowingTable, TableMark, verify_table
from sparing.runs.files.lock import FolderLock
from sparing.runs.results import (
    METRICS_HEADER,
    ROUND_COLUMNS,
    Record,
    Result,
    client_rows,
    clients_header,
    metric_rows,
    read_metric_rows,
    read_round_row,
    round_row,
)
from sparing.runs.study import read_yaml
from sparing.storage.atomic import os_errors_as_checkpoint_error, write_atomic, write_json
from sparing.storage.bank import Bank

CONFIG_FILE, ROUNDS_FILE, LEDGER_FILE, SUMMARY_FILE = "config.yaml", "rounds.csv", "ledger.csv", "summary.json"
ENVIRONMENT_FILE, LOG_FILE = "environment.json", "log.txt"
FAILED_FILE = "failed.txt"  # why training broke down, where it did
CLIENTS_FILE = "clients.csv"
METRICS_FILE = "metrics.csv"
PICTURES_FILE = "pictures.jsonl"
_TABLE_HEADERS = {
    ROUNDS_FILE: ",".join(ROUND_COLUMNS) + "\n",
    LEDGER_FILE: ledger.ledger_header(),
    CLIENTS_FILE: clients_header(),
    METRICS_FILE: METRICS_HEADER,
    PICTURES_FILE: "",
}
CHECKPOINT_FILE, SLOTS_FILE, SERVER_SLOTS_FILE = "checkpoint.safetensors", "clients.slots", "server.slots"


class RunFolder:
    """Where one run is written, by this process alone until it is closed."""

    def __init__(self, path: Path):
        self.path, self.lock = path, FolderLock(path)
        self.tables = {name: GrowingTable(path / name) for name in _TABLE_HEADERS}
        self.beside = {
            name: GrowingTable(path / name) for name in (ENVIRONMENT_FILE, LOG_FILE)
        }  # vouched for, but never cut

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        self.lock.release()

    @classmethod
    def create(cls, path: str | Path, device: str, ranked_by: str = "accuracy", secure: bool = False) -> "RunFolder":
        """A new folder, not yet a run; one that already holds a run, or folders of runs, is left alone.

        `ranked_by`: the metric that every client is measured by, beside accuracy, loss and auc. `secure`: with columns
        for secure aggregation in the ledger.
        """
        path = Path(path)
        _refuse_taken_folder(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write to {path} ({error.strerror}); choose another folder") from None
        folder = cls(path)
        try:
            _refuse_taken_folder(path)  # once more, now that nobody else can change it
            with os_errors_as_checkpoint_error(path):
                write_json(path / ENVIRONMENT_FILE, describe_environment(device))
            own = {CLIENTS_FILE: clients_header(ranked_by), LEDGER_FILE: ledger.ledger_header(secure)}
            for name, header in (_TABLE_HEADERS | own).items():
                folder.tables[name].create(header)
            folder.beside[LOG_FILE].create()
            folder.beside[ENVIRONMENT_FILE].follow()
        except BaseException:
            folder.close()
            raise
        return folder

    def publish(self, config: dict[str, Any]) -> None:
        """From here on it is a run."""
        with os_errors_as_checkpoint_error(self.path / CONFIG_FILE):
            write_atomic(self.path / CONFIG_FILE, yaml.safe_dump(config, sort_keys=False).encode())

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """An existing run, to go on with."""
        read_config(path)
        return cls(Path(path))

    def append(self, t: int, record: Record, outcome: Outcome, evaluation: Evaluation | None, views: str = "") -> None:
        self.lock.check()
        self.tables[ROUNDS_FILE].append(round_row(record))
        self.tables[LEDGER_FILE].append(ledger.ledger_rows(t, outcome, self._header(LEDGER_FILE)))
        self.tables[METRICS_FILE].append(metric_rows(record))
        self.tables[PICTURES_FILE].append(views)
        if evaluation:
            self.tables[CLIENTS_FILE].append(client_rows(t, evaluation, self._header(CLIENTS_FILE)))

    def _header(self, table: str) -> str:
        """As the folder was made."""
        with os_errors_as_checkpoint_error(self.path / table), open(self.path / table) as file:
            return file.readline()

    def save(
        self, server: Server, bank: Bank, rows: Bank | None, meta: dict[str, Any], owed: Tree | None = None
    ) -> None:
        """One durable checkpoint of the server, the clients, and the length and digest of every table."""
        self.lock.check()
        self.beside[LOG_FILE].follow()
        marks = {name: table.mark() for name, table in (self.tables | self.beside).items()}
        tensors = (
            prefixed("model", server.model)
            | prefixed("share", server.share)
            | prefixed("blend", server.blend)
            | prefixed("fit", server.fit)
            | prefixed("past", server.past)
            | {"met": server.met}
            | prefixed("bank", bank.state())
            | prefixed("rows", rows.state() if rows else {})
            | prefixed("owed", owed or {})
        )
        checkpoint.save_checkpoint(self.path / CHECKPOINT_FILE, tensors, {**meta, "files": marks})
        bank.committed()
        if rows:
            rows.committed()

    def load(self) -> tuple[Tree, dict[str, Any]]:
        """The tensors and the meta of the last checkpoint; every file is as it says, but nothing is cut yet."""
        tensors, meta = checkpoint.load_checkpoint(self.path / CHECKPOINT_FILE)
        for name, table in (self.tables | self.beside).items():
            table.restore(meta["files"][name])
        if (self.path / ENVIRONMENT_FILE).stat().st_size != self.beside[ENVIRONMENT_FILE].size:
            raise CheckpointError(
                f"{self.path / ENVIRONMENT_FILE} was altered after it was written; restore it from a copy"
            )
        return tensors, meta

    def cut(self) -> None:
        """Drop the rounds that came after the checkpoint: they will be trained again."""
        for table in self.tables.values():
            table.cut()

    def records(self, rounds: int) -> list[Record]:
        """The table so far, which must have one row for every round."""
        path, size = self.path / ROUNDS_FILE, self.tables[ROUNDS_FILE].size
        said = read_metric_rows((self.path / METRICS_FILE).read_bytes()[: self.tables[METRICS_FILE].size].decode())
        table = [read_round_row(line, said) for line in path.read_bytes()[:size].decode().splitlines()[1:]]
        if [record.round for record in table] != list(range(1, rounds + 1)):
            raise CheckpointError(f"{path} does not hold rounds 1 to {rounds}; restore it from a copy")
        return table

    def finish(self, result: Result) -> None:
        self.lock.check()
        with os_errors_as_checkpoint_error(self.path / SUMMARY_FILE):
            write_json(self.path / SUMMARY_FILE, result.summary)


class FollowedFolder(RunFolder):
    """The same folder as ranks see it that write nothing, but have a part in its checkpoints."""

    def __init__(self, path: Path):
        self.path = path
        self.tables = {name: GrowingTable(path / name) for name in _TABLE_HEADERS}
        self.beside = {name: GrowingTable(path / name) for name in (ENVIRONMENT_FILE, LOG_FILE)}
        self.lock = _NoLock()

    def close(self) -> None:
        pass

    def append(self, t: int, record: Record, outcome: Outcome, evaluation: Evaluation | None, views: str = "") -> None:
        pass

    def save(
        self, server: Server, bank: Bank, rows: Bank | None, meta: dict[str, Any], owed: Tree | None = None
    ) -> None:
        for one in (bank, rows):
            if one is not None:
                one.state()
        for one in (bank, rows):
            if one is not None:
                one.committed()

    def cut(self) -> None:
        pass


class _NoLock:
    def check(self) -> None:
        pass


def read_config(path: str | Path) -> dict[str, Any]:
    """The config of the run in a folder, which anybody may read."""
    path = Path(path)
    if not (path / CONFIG_FILE).is_file():
        raise ConfigError(f"{path} holds no run: there is no {CONFIG_FILE} in it; check the path")
    return read_yaml(path / CONFIG_FILE)


def server_from_tensors(tensors: Tree) -> Server:
    """The server as a checkpoint has it."""
    model, share, blend, fit, past = (under(part, tensors) for part in ("model", "share", "blend", "fit", "past"))
    return Server(model, share, blend, fit, tensors["met"], limits_of(model), past=past)


def _refuse_taken_folder(path: Path) -> None:
    """A folder that holds a run, a part of one, or folders of runs. What a broken-off start left is no run yet."""
    if (path / CONFIG_FILE).exists():
        raise ConfigError(
            f"{path} already holds a run; continue it with `sparing resume {path}` or choose another folder"
        )
    if inner := next(iter(sorted(path.glob(f"*/{CONFIG_FILE}"))), None):
        raise ConfigError(f"{path} holds run folders such as {inner.parent.name}; choose a folder in it or elsewhere")
    if part := _file_of_trained_rounds(path):
        raise ConfigError(
            f"{path} holds {part} of a run, but no {CONFIG_FILE}; "
            "bring that back to resume it, or choose another folder"
        )


def _file_of_trained_rounds(path: Path) -> str | None:
    """A file that rounds of training have left."""
    for name in (SLOTS_FILE, SERVER_SLOTS_FILE, SUMMARY_FILE):
        if (path / name).exists():
            return name
    for name, header in _TABLE_HEADERS.items():
        if (path / name).is_file() and _has_rows(path / name, header):
            return name
    return CHECKPOINT_FILE if saved_round(path) else None


def _has_rows(path: Path, header: str) -> bool:
    """Whether there is more than a header, of whatever columns."""
    with open(path, "rb") as file:
        if header:
            file.readline()
        return bool(file.read(1))


def read_checkpoint_meta(path: Path) -> dict[str, Any] | None:
    """The meta of a folder's checkpoint, of which only the header is read; None where there is none."""
    if not (path / CHECKPOINT_FILE).is_file():
        return None
    with open(path / CHECKPOINT_FILE, "rb") as file:
        return json.loads(checkpoint.read_checkpoint_header(file, path / CHECKPOINT_FILE)["__metadata__"]["meta"])


def saved_round(path: Path) -> int:
    """The round of the last checkpoint; 0 before the first, and where there is none."""
    meta = read_checkpoint_meta(path)
    return meta["round"] if meta else 0


def refuse_altered_files(path: Path, fingerprint: str) -> None:
    """A study or tables that are not as they were written, where a checkpoint vouches for them."""
    meta = read_checkpoint_meta(path) or {}
    if meta.get("identity", {}).get("study", fingerprint) != fingerprint:
        raise CheckpointError(f"{path / CONFIG_FILE} was altered after it was written; restore it from a copy")
    marks: dict[str, TableMark] = meta.get("files", {})
    for name in _TABLE_HEADERS:
        if name in marks and (path / name).exists():  # who needs one that is missing says so
            verify_table(path / name, marks[name])
