"""`sparing new`: a folder to start from, and nothing overwritten."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from sparing.cli.app import app
from sparing.runs.study import load_study


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def call(*args: str):
    return CliRunner().invoke(app, [*args])


def test_a_study_that_loads_and_a_readme_whose_commands_work(monkeypatch):
    result = call("new", "mine")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "wrote mine/study.yaml",
        "wrote mine/README.md",
        "next: cd mine && sparing check study.yaml && sparing run study.yaml",
    ]
    monkeypatch.chdir("mine")
    study = load_study("study.yaml")
    assert (study.task.data, study.method, study.rounds) == ("digits", ["fedavg"], 30)
    text = Path("README.md").read_text()
    assert text.startswith("# mine\n")
    commands = [line.split("#")[0].split() for line in text.splitlines() if line.startswith("    sparing ")]
    assert [words[1] for words in commands] == ["check", "run", "run", "run", "run", "compare"]
    small = ["rounds=1", "task.model=mlp", "task.clients=4", "plan.threads=1"]
    for _, command, *words in commands[1:]:
        assert call(command, *words, *(small if command == "run" else ())).exit_code == 0
    assert {path.name for path in Path("runs").iterdir()} == {
        f"digits-{method}-{seed}" for method in ("fedavg", "topk+memory") for seed in (0, 1)
    }


def test_the_study_learns():
    call("new", "mine")
    result = call("run", "mine/study.yaml", "rounds=20", "plan.threads=1", "--json")
    assert json.loads(result.stdout)["best_accuracy"] > 0.9, "which its README asks for"
    assert "--target 0.9" in Path("mine/README.md").read_text()


def test_every_key_of_the_file_is_explained():
    call("new", "mine")
    lines = Path("mine/study.yaml").read_text().splitlines()
    keys = [line for line in lines if re.match(r"\s*\w+:", line)]
    assert sum("#" in line for line in keys) > len(keys) / 2
    assert set(yaml.safe_load(Path("mine/study.yaml").read_text())) >= {"task", "method", "local", "rounds", "sample"}


@pytest.mark.parametrize("there", ["folder", "file"])
def test_nothing_is_overwritten(there):
    if there == "folder":
        Path("mine").mkdir()
        Path("mine/study.yaml").write_text("rounds: 3\n")
    else:
        Path("mine").write_text("precious")
    result = call("new", "mine")
    assert result.exit_code == 2
    assert result.stderr == "sparing: mine is already there and is left as it is; choose another name\n"
    held = Path("mine/study.yaml") if there == "folder" else Path("mine")
    assert held.read_text() in ("rounds: 3\n", "precious")
    assert there == "file" or [path.name for path in Path("mine").iterdir()] == ["study.yaml"]
