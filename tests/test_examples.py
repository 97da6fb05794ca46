"""The examples run as a user would run them, and one is refused in a process; the notebook runs as Jupyter would."""

import csv
import json
import runpy
import subprocess
import sys
from pathlib import Path

import h5py
import nbformat
import pytest
from nbclient import NotebookClient
from PIL import Image

import sparing
from sparing.core.registry import REGISTRY, known_recipes
from sparing.runs.start import start_run
from sparing.runs.study import load_study

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "quickstart.ipynb"


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    """Calls an example in an empty folder and gives the lines that it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    before = known_recipes()

    def call(name: str, *words: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *words])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    yield call
    for name in REGISTRY.keys() - before.keys():
        del REGISTRY[name]


def test_parts_of_ones_own(printed, monkeypatch):
    """In three rounds instead of six: biases of `alternate` stay at home, travel, and stay."""
    run = sparing.run
    monkeypatch.setattr(sparing, "run", lambda *given, **study: run(*given, **study | {"rounds": 3}))
    rows = printed("my_part.py")[1:]
    assert len(rows) == 5
    assert all(row.endswith("yes") for row in rows)


def test_a_task_of_ones_own(printed):
    fedavg, sparse = printed("own_task.py")
    assert fedavg.startswith("fedavg")
    assert sparse.startswith("topk+int8+memory")
    error, kilobytes = ([float(row.split()[i]) for row in (fedavg, sparse)] for i in (-4, -3))
    assert max(error) < 0.1, "it learns the curve"
    assert kilobytes[1] < kilobytes[0] / 3


def test_texts_by_client(monkeypatch):
    """In three rounds instead of ten, from the folder of the repository, as its first lines say."""
    monkeypatch.chdir(EXAMPLES.parent)
    study = load_study("examples/texts.yaml", ["rounds=3"])
    perplexity = start_run(study).metric("perplexity")
    assert perplexity[-1] < perplexity[0] < 97


def test_five_methods_are_compared(printed, tmp_path):
    lines = printed("compare_five.py", "--rounds", "1", "--seeds", "2")
    assert len(list((tmp_path / "runs" / "five").iterdir())) == 10
    title = next(i for i, line in enumerate(lines) if line.startswith("Accuracy on digits"))
    shown = [line.split()[0] for line in lines[title + 4 : title + 9]]
    assert shown[0] == "fedavg"
    assert sorted(shown[1:]) == ["ecsq+memory", "fedscr+int8", "psfed+int8", "topk+int8+memory"]
    trained = (tmp_path / "runs" / "five" / "topk-1" / "rounds.csv").read_text()
    (tmp_path / "runs" / "five" / "topk-1" / "summary.json").unlink()
    assert printed("compare_five.py", "--rounds", "1", "--seeds", "2") == lines
    assert (tmp_path / "runs" / "five" / "topk-1" / "rounds.csv").read_text() == trained, "it was not trained again"
    command = [sys.executable, EXAMPLES / "compare_five.py", "--rounds", "2", "--seeds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    line = "compare_five: runs/five/fedavg-0 holds a run of another study; choose another place with --out"
    assert done.stderr.splitlines() == [line], "and no traceback"


def test_the_sr_study(printed, tmp_path):
    lines = printed("sr_study.py", "--seeds", "2")
    assert printed("sr_study.py", "--seeds", "2") == lines, "the second time it reads what is there"
    results = tmp_path / "results"
    table = list(csv.DictReader((results / "comparison.csv").read_text().splitlines()))
    assert len(table) == 3
    means = []
    for name in ("FedAvg_study", "SR-FedAvg_study", "SR-FedAvg_studytopk"):
        with h5py.File(results / f"digits_{name}_all.h5") as file:
            assert file["test_acc"].shape == (2, 10)
            means.append(float(file["test_acc_mean"][-1]))
    assert sorted(float(row["final_accuracy"]) for row in table) == pytest.approx(sorted(means), abs=1e-4)
    for name in ("accuracy-by-round", "stability"):
        with Image.open(results / f"{name}.png") as image:
            assert image.width > 500


def test_the_notebook_runs_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    book = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(book)
    training = next(cell for cell in book.cells if '"rounds": 15' in cell.source)
    training.source = training.source.replace('"rounds": 15', '"rounds": 4')
    NotebookClient(book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    cells = [cell for cell in book.cells if cell.cell_type == "code"]
    said = ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]
    kinds = [kind for cell in cells for output in cell.outputs for kind in output.get("data", {})]
    assert len(said[1].splitlines()) == 9, "three methods, three seeds"
    assert "text/markdown" in kinds
    assert "image/png" in kinds
    assert "8 figures of 12 runs" in said[-1]
    assert len(list(tmp_path.glob("*/report.html"))) == 1


def test_the_notebook_is_kept_without_outputs():
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None
