"""Result files in the layout that people's scripts load: what is in them, and that they are never half written."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

import sparing
from made import record
from sparing.core.errors import ConfigError
from sparing.reports.h5_files import h5_file_name, write_h5, write_h5_files
from sparing.storage import atomic

RUNS = [[0.1, 0.5, 0.7], [0.2, 0.4, 0.9]]


def table(accuracy, loss=1.0):
    return [record(t, accuracy=a, train_loss=loss / t, auc=a / 2) for t, a in enumerate(accuracy, 1)]


def loaded(path):
    with h5py.File(path, "r") as file:
        return {name: np.array(file[name]) for name in file}, dict(file.attrs)


def test_the_layout_of_one_run_and_of_all(tmp_path):
    paths = write_h5_files(tmp_path, "MNIST", "SR-FedAvg", "mine", [table(run) for run in RUNS])
    assert [path.name for path in paths] == [f"MNIST_SR-FedAvg_mine_{run}.h5" for run in (0, 1, "all")]
    for path, runs in zip(paths, ([RUNS[0]], [RUNS[1]], RUNS), strict=True):
        data, attrs = loaded(path)
        assert attrs == {"algorithm": "SR-FedAvg", "dataset": "MNIST", "rounds": 3}
        expected = {
            "test_acc": np.array(runs),
            "test_acc_mean": np.mean(runs, axis=0),
            "test_acc_std": np.std(runs, axis=0, ddof=1) if len(runs) > 1 else np.full(3, np.nan),
            "train_loss": np.array([[1, 1 / 2, 1 / 3]] * len(runs)),
            "train_loss_mean": np.array([1, 1 / 2, 1 / 3]),
            "train_loss_std": np.zeros(3) if len(runs) > 1 else np.full(3, np.nan),
            "rs_test_acc": np.mean(runs, axis=0),
            "rs_test_auc": np.mean(runs, axis=0) / 2,
            "rs_train_loss": np.array([1, 1 / 2, 1 / 3]),
        }
        assert set(data) == set(expected)
        for name, values in expected.items():
            assert data[name].shape == values.shape
            np.testing.assert_allclose(data[name], values, rtol=1e-15)


def test_scripts_that_load_such_files_find_what_they_look_for(tmp_path):
    """As such scripts do it: the curve of every run by its number, then the best accuracy over runs."""
    write_h5_files(tmp_path, "MNIST", "FedAvg", "test", [table(run) for run in RUNS])
    best = []
    for i in range(2):
        with h5py.File(f"{tmp_path}/MNIST_FedAvg_test_{i}.h5", "r") as file:
            curve = np.array(file.get("rs_test_acc"))
        assert curve.ndim == 1
        best.append(curve.max())
    assert best == [0.7, 0.9]


def test_a_run_has_exactly_its_rounds(tmp_path):
    result = sparing.run({"data": "digits", "clients": 4, "model": "mlp"}, rounds=3, plan={"threads": 1})
    data, attrs = loaded(write_h5(tmp_path, "digits", "FedAvg", "test", 0, [result.table]))
    assert attrs["rounds"] == 3
    assert data["rs_test_acc"].tolist() == [r.accuracy for r in result.table]
    assert data["rs_train_loss"].tolist() == [r.train_loss for r in result.table]
    assert all(0.5 < auc <= 1 for auc in data["rs_test_auc"])
    assert all(np.isfinite(values).all() for name, values in data.items() if not name.endswith("_std"))
    assert np.isnan(data["test_acc_std"]).all(), "one run has no spread"


def test_rounds_that_were_not_evaluated_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"round 2 has none; run with evaluate.every=1"):
        write_h5_files(tmp_path, "a", "b", "c", [table([0.1, math.nan, 0.3])])
    with pytest.raises(ConfigError, match="equally many rounds, seen 2 and 3"):
        write_h5_files(tmp_path, "a", "b", "c", [table([0.1, 0.2]), table([0.1, 0.2, 0.3])])
    assert not (tmp_path / "a_b_c_all.h5").exists()


def test_names_of_files_hold_no_separators():
    assert (
        h5_file_name("pfllib:dataset/MNIST", "topk (ratio=0.2)", "a b", 1)
        == "pfllib-dataset-MNIST_topk-ratio=0.2_a-b_1.h5"
    )


@pytest.mark.parametrize("place", ["write", "fsync", "replace"])
def test_a_fault_while_writing_leaves_the_old_file(tmp_path, monkeypatch, place):
    path = write_h5(tmp_path, "a", "b", "c", 0, [table([0.1, 0.2])])
    before = path.read_bytes()

    def broken(*args):
        raise OSError("no space left")

    if place == "write":
        monkeypatch.setattr(h5py, "File", broken)
    else:
        monkeypatch.setattr(atomic.os, place, broken)
    error = OSError if place == "write" else ConfigError
    with pytest.raises(error, match="no space"):
        write_h5(tmp_path, "a", "b", "c", 0, [table([0.3, 0.4])])
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from made import record
from sparing.reports.h5_files import write_h5
i = 0
while True:
    i += 1
    table = [record(t, accuracy=float(i), train_loss=0.0, auc=0.5) for t in range(1, 2000)]
    write_h5(sys.argv[1], "a", "b", "c", 0, [table])
    if i == 1:
        print("ready", flush=True)
"""


def test_kill_while_writing_leaves_a_whole_file(tmp_path):
    tests = str(Path(__file__).parents[1])
    child = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, tests], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    seen = set()
    until = time.monotonic() + 1.0
    while time.monotonic() < until:  # whoever reads meanwhile sees whole files too
        curve = loaded(tmp_path / "a_b_c_0.h5")[0]["rs_test_acc"]
        assert len(curve) == 1999
        assert len(set(curve)) == 1
        seen.add(curve[0])
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert len(seen) > 3, "the writer was at work"
    curve = loaded(tmp_path / "a_b_c_0.h5")[0]["rs_test_acc"]
    assert (len(curve), len(set(curve))) == (1999, 1)
