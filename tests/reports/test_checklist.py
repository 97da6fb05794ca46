"""The checklist of the SR-FedAvg study, item by item, on the embedded digits.

Item 8, the notebook end to end, is in tests/test_examples.py.
The three methods of the study run as its light configuration does, by their flags, with two seeds each; the network is
smaller and the learning rate larger, to suit 1,797 samples.
"""

import csv
import io
import json
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from sparing.cli.app import app
from sparing.reports.figure_files import write_figures
from sparing.reports.html_page import report_figures
from sparing.reports.run_folders import find_run_folders, group_runs, read_run_folder

FLAGS = "-data digits -nc 10 -gr 10 -le 2 -bs 256 -lr 0.3 -jr 0.5 -t 2 task.model=mlp plan.threads=1"
LIGHT = FLAGS.split(" ")
METHODS = {
    "plain": ["-algo", "FedAvg"],
    "sr": ["-algo", "SR-FedAvg", "-srbeta", "0.9", "-srwarmup", "2"],
    "sr_topk": ["-algo", "SR-FedAvg", "-srbeta", "0.9", "-srwarmup", "2", "-topk", "0.2"],
}
ROUNDS, SEEDS, WARMUP = 10, 2, 2
MINUTES = 5 * 60


def call(*args: object):
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The study's results: run folders in runs/, H5 files in results/, and what the command said in GOAL.json."""
    home = tmp_path_factory.mktemp("study")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        for goal, flags in METHODS.items():
            began = time.monotonic()
            said = json.loads(call("pfllib", *flags, *LIGHT, "-go", goal, "--json").stdout)
            Path(f"{goal}.json").write_text(json.dumps(said | {"wall": time.monotonic() - began}))
    return home


@pytest.fixture(scope="module")
def rows(home):
    """In the order of METHODS."""
    found = json.loads(call("compare", home / "runs", "--warmup", WARMUP, "--json").stdout)["rows"]
    ends = [row["stats"]["final_accuracy"]["mean"] for row in found[1:]]
    assert found[0]["label"] == "fedavg", "the baseline is first"
    assert ends == sorted(ends, reverse=True), "then the best"
    return sorted(found, key=lambda row: len(row["label"]))


def said(home: Path, goal: str) -> dict:
    return json.loads((home / f"{goal}.json").read_text())


def h5(home: Path, goal: str, run: int | str) -> dict[str, np.ndarray]:
    algorithm = "FedAvg" if goal == "plain" else "SR-FedAvg"
    with h5py.File(home / "results" / f"digits_{algorithm}_{goal}_{run}.h5") as file:
        return {name: np.array(file[name]) for name in file} | dict(file.attrs)


def test_1_the_light_configuration_is_quick(home):
    assert all(said(home, goal)["wall"] < MINUTES for goal in METHODS)
    assert all(len(said(home, goal)["runs"]) == SEEDS for goal in METHODS)


@pytest.mark.parametrize("goal", METHODS)
def test_2_the_h5_files_are_valid(home, goal):
    runs = [h5(home, goal, i) for i in range(SEEDS)]
    together = h5(home, goal, "all")
    assert together["rounds"] == ROUNDS
    assert together["test_acc"].shape == together["train_loss"].shape == (SEEDS, ROUNDS)
    np.testing.assert_array_equal(together["test_acc"], np.concatenate([run["test_acc"] for run in runs]))
    np.testing.assert_allclose(together["test_acc_mean"], together["test_acc"].mean(axis=0))
    assert all(run["rs_test_acc"].shape == (ROUNDS,) for run in runs)
    assert all(((run["rs_test_auc"] > 0) & (run["rs_test_auc"] <= 1)).all() for run in runs)


def test_3_three_methods_are_compared_in_the_order_measured(home, rows):
    assert [row["label"] for row in rows] == ["fedavg", "sr-fedavg (warmup=2)", "sr-fedavg (warmup=2, topk=0.2)"]
    for row, goal in zip(rows, METHODS, strict=True):
        final = h5(home, goal, "all")["test_acc"][:, -1]
        assert row["stats"]["final_accuracy"]["mean"] == pytest.approx(final.mean())
        assert final.mean() > 0.3, "it learns"
    by_table = sorted(METHODS, key=lambda g: -rows[list(METHODS).index(g)]["stats"]["final_accuracy"]["mean"])
    assert by_table == sorted(METHODS, key=lambda g: -h5(home, g, "all")["test_acc_mean"][-1])
    assert rows[2]["ratios"]["compression"] > 3 * rows[1]["ratios"]["compression"], "top-k sends less"


def test_4_stability_and_its_change_against_fedavg(home, rows):
    for row, goal in zip(rows, METHODS, strict=True):
        curves = h5(home, goal, "all")["test_acc"]
        jitter = np.diff(curves[:, WARMUP:], axis=1).std(axis=1, ddof=1).mean()
        assert row["stats"]["seed_std"]["mean"] == pytest.approx(curves.std(axis=0, ddof=1).mean())
        assert row["stats"]["jitter"]["mean"] == pytest.approx(jitter)
        base = rows[0]["stats"]["jitter"]["mean"]
        assert row["ratios"]["jitter_change"] == pytest.approx(jitter / base - 1)


@pytest.mark.parametrize("goal", METHODS)
def test_5_every_number_is_finite(home, goal):
    for run in (0, 1, "all"):
        data = {name: values for name, values in h5(home, goal, run).items() if isinstance(values, np.ndarray)}
        assert all(np.isfinite(values).all() for name, values in data.items() if not name.endswith("_std"))
        assert run != "all" or np.isfinite(data["test_acc_std"]).all(), "one run has no spread"


def test_6_the_plots_render(home, tmp_path):
    groups, _ = group_runs([read_run_folder(folder) for folder in find_run_folders([home / "runs"])])
    made = dict(report_figures(groups))
    for path in write_figures([made["Accuracy by round"], made["Stability"]], tmp_path, ["png"]):
        with Image.open(path) as image:
            assert len(np.unique(np.asarray(image.convert("L")))) > 10, f"{path.name} is blank"
    assert len(list(tmp_path.iterdir())) == 2


def test_7_the_table_has_four_decimals(home):
    table = list(csv.DictReader(io.StringIO(call("compare", home / "runs", "--csv").stdout)))
    for row in table:
        for name in ("final_accuracy", "best_accuracy", "final_loss", "best_loss", "convergence_round"):
            _, point, decimals = row[name].partition(".")
            assert (point, len(decimals)) == (".", 4)
            assert float(row[name]) >= 0


def test_9_hyper_parameters_matter(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual = said(home, "sr_topk")["runs"][0]["model_sha256"]
    changes = {"beta": ["-srbeta", "0.5"], "warmup": ["-srwarmup", "0"], "topk": ["-topk", "0.05"], "le": ["-le", "1"]}
    other = {}
    for goal, change in changes.items():
        flags = [*METHODS["sr_topk"], *LIGHT, "-t", "1", *change, "-go", goal, "--json"]
        other[goal] = json.loads(call("pfllib", *flags).stdout)["runs"][0]["model_sha256"]
    assert len({usual, *other.values()}) == 1 + len(changes)


def test_10_the_seed_reproduces(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    again = json.loads(call("pfllib", *METHODS["sr_topk"], *LIGHT, "-go", "sr_topk", "--json").stdout)
    first = said(home, "sr_topk")
    assert [run["model_sha256"] for run in again["runs"]] == [run["model_sha256"] for run in first["runs"]]
    assert again["runs"][0]["model_sha256"] != again["runs"][1]["model_sha256"]
    for run in (0, 1, "all"):
        name = f"results/digits_SR-FedAvg_sr_topk_{run}.h5"
        assert Path(name).read_bytes() == (home / name).read_bytes()
