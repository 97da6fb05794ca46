"""Results as HDF5 files `DATASET_ALGORITHM_GOAL_RUN.h5`, in the layout people's scripts already load.

    attributes                        algorithm, dataset, rounds
    test_acc, train_loss              (runs, rounds)
    *_mean, *_std of both             (rounds,), over runs; std is the deviation with n - 1, NaN for one run
    rs_test_acc, rs_test_auc, rs_train_loss   (rounds,), mean over runs

test_acc is the global model's accuracy on all test samples. A file is built in memory and takes its place in one step,
so it is whole whenever it is there.
"""

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from sparing.core.errors import ConfigError
from sparing.runs.results import Record
from sparing.storage.atomic import write_atomic

_H5_CURVES = {"test_acc": "accuracy", "train_loss": "train_loss", "test_auc": "auc"}
_UNSAFE_IN_NAMES = re.compile(r"[^\w.+=-]+")  # in the name of a file
_RoundTable = Sequence[Record]


def h5_file_name(dataset: str, algorithm: str, goal: str, run: int | str) -> str:
    """
    >>> h5_file_name("MNIST", "SR-FedAvg", "test", 0)
    'MNIST_SR-FedAvg_test_0.h5'
    """
    words = (_UNSAFE_IN_NAMES.sub("-", str(word)).strip("-") for word in (dataset, algorithm, goal, run))
    return "_".join(words) + ".h5"


def write_h5(
    folder: str | Path, dataset: str, algorithm: str, goal: str, run: int | str, tables: Sequence[_RoundTable]
) -> Path:
    """One file, of one run or of several together."""
    data = _h5_bytes(dataset, algorithm, tables)
    path = Path(folder) / h5_file_name(dataset, algorithm, goal, run)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror or error}); choose another folder") from None
    return path


def write_h5_files(
    folder: str | Path, dataset: str, algorithm: str, goal: str, tables: Sequence[_RoundTable]
) -> list[Path]:
    """A file for each run, numbered from 0, and one for all."""
    files = [(i, [table]) for i, table in enumerate(tables)] + [("all", list(tables))]
    return [write_h5(folder, dataset, algorithm, goal, run, some) for run, some in files]


def _h5_bytes(dataset: str, algorithm: str, tables: Sequence[_RoundTable]) -> bytes:
    curves = {name: _curve_matrix(tables, column) for name, column in _H5_CURVES.items()}
    out = io.BytesIO()
    with h5py.File(out, "w") as file:
        file.attrs.update({"algorithm": algorithm, "dataset": dataset, "rounds": len(tables[0])})
        for name in ("test_acc", "train_loss"):
            file[name] = curves[name]
            file[f"{name}_mean"] = curves[name].mean(axis=0)
            alone = np.full(curves[name].shape[1], np.nan)
            file[f"{name}_std"] = curves[name].std(axis=0, ddof=1) if len(tables) > 1 else alone
        for name, values in curves.items():
            file[f"rs_{name}"] = values.mean(axis=0)
    return out.getvalue()


def _curve_matrix(tables: Sequence[_RoundTable], column: str) -> np.ndarray:
    """One column, (runs, rounds); every round has to be there."""
    lengths = sorted({len(table) for table in tables})
    if len(lengths) != 1 or not lengths[0]:
        seen = " and ".join(map(str, lengths)) or "no"
        raise ConfigError(f"an H5 file needs runs of equally many rounds, seen {seen}; finish them, or give others")
    if column == "accuracy":
        if all(math.isnan(r.accuracy) for table in tables for r in table):
            raise ConfigError("an H5 file holds accuracies, and these runs have none; write their tables with --csv")
        missing = next((r.round for table in tables for r in table if math.isnan(r.accuracy)), None)
        if missing is not None:
            raise ConfigError(
                f"an H5 file needs an accuracy for every round, and round {missing} has none; run with evaluate.every=1"
            )
    return np.array([[getattr(record, column) for record in table] for table in tables], dtype=np.float64)
