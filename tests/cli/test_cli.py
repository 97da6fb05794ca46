"""The command line as a user meets it: what it prints, what it writes, how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import sparing
from sparing.cli.app import app
from sparing.runs.start import start_run
from sparing.runs.study import load_study

SMALL = ["task.clients=4", "task.model=mlp", "plan.threads=1"]
STOPPABLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
from sparing.cli.app import main
main()
"""
SWALLOWING = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from sparing.cli.app import main
from sparing.runs import snapshots

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def is_snapshot_round(round, last):
    if round == 2:
        Dying()
    return False

snapshots.is_snapshot_round = is_snapshot_round
main()
"""
FILES = {
    ".lock",
    "config.yaml",
    "environment.json",
    "log.txt",
    "rounds.csv",
    "clients.csv",
    "ledger.csv",
    "metrics.csv",
    "pictures.jsonl",
    "summary.json",
    "checkpoint.safetensors",
}


def call(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def refused(result, *words: str) -> None:
    """Exit code 2, nothing on stdout, one line on stderr that holds these words."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("sparing: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of three rounds, not to be touched."""
    folder = tmp_path_factory.mktemp("ui") / "run"
    assert call("run", *SMALL, "rounds=3", "method=topk+memory", "--out", folder).exit_code == 0
    return folder


@pytest.fixture
def ran(finished, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "ran"))


def test_run_writes_a_folder_that_agrees_with_itself(finished):
    assert {path.name for path in finished.iterdir()} == FILES
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["method"] == "topk+memory"
    assert summary["rounds"] == 3
    rows = (finished / "rounds.csv").read_text().splitlines()
    assert len(rows) == 4
    column = rows[0].split(",").index("up_bytes")
    assert summary["up_bytes"] == sum(int(row.split(",")[column]) for row in rows[1:])
    assert yaml.safe_load((finished / "config.yaml").read_text())["task"]["clients"] == 4


def test_plain_lines_and_a_summary_where_there_is_no_terminal():
    result = call("run", *SMALL, "rounds=20", "local.steps=1")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[2] for line in lines if " round " in line] == [f"{t}/20" for t in range(2, 21, 2)]
    assert "accuracy" in lines[0]
    assert "MB" in lines[0]
    assert "runs/digits-fedavg-0" in lines[-1]
    assert "\x1b" not in result.output


def test_file_and_overrides_mix_in_any_order():
    Path("study.yaml").write_text("rounds: 9\nmethod: psfed+int8\n")
    result = call("run", "rounds=1", "study.yaml", *SMALL, "local.lr=0.2", "--json")
    config = yaml.safe_load(Path("runs/digits-psfed+int8-0/config.yaml").read_text())
    assert result.exit_code == 0
    assert (config["rounds"], config["local"]["lr"], config["method"]) == (1, 0.2, ["psfed", "int8"])


def test_a_taken_default_folder_gets_a_number():
    words = ["run", *SMALL, "rounds=1", "local.steps=1", "--json"]
    folders = [json.loads(call(*words).stdout)["folder"] for _ in range(3)]
    assert folders == ["runs/digits-fedavg-0", "runs/digits-fedavg-0-2", "runs/digits-fedavg-0-3"]


def test_resume_of_a_stopped_run_ends_like_the_unbroken_one(finished):
    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    study = load_study(None, [*SMALL, "rounds=3", "method=topk+memory"])
    with pytest.raises(KeyboardInterrupt):
        start_run(study, out="cut", loggers=[stop])
    assert not Path("cut/summary.json").exists()
    result = call("resume", "cut")
    assert result.exit_code == 0
    assert " round 3/3 " in result.stdout
    whole, cut = (json.loads((folder / "summary.json").read_text()) for folder in (finished, Path("cut")))
    assert cut | {"seconds": 0} == whole | {"seconds": 0}


def test_methods_are_listed_with_options_and_papers():
    text = call("methods").stdout
    entries = {entry["name"]: entry for entry in json.loads(call("methods", "--json").stdout)}
    assert {"fedavg", "psfed", "topk", "randk", "int8", "memory", "personal", "fedavgm"} <= set(entries)
    assert entries["topk"]["options"]["ratio"] == 0.1
    for entry in entries.values():
        assert entry["about"]
        assert entry["name"] in text
        assert all(f"{name}=" in text for name in entry["options"])


def test_explain_takes_a_method_as_run_does():
    shown = [call("explain", method).stdout for method in ("psfed+int8", "method=psfed+int8")]
    assert shown[0] == shown[1] != ""


def test_demo_prints_a_row_for_every_method():
    result = call("demo", "--rounds", 1)
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.endswith(" s")]
    assert [row.split("  ")[0] for row in rows] == [
        "fedavg",
        "psfed",
        "psfed, per client",
        "personal",
        "randk+memory",
        "topk+memory",
        "topk+int8+memory",
        "psfed+topk+int8+memory",
    ]
    assert max(len(line) for line in result.stdout.splitlines() if " round " not in line and "run " not in line) <= 80
    assert "Try next" in result.stdout


def test_demo_as_json():
    rows = json.loads(call("demo", "--rounds", 1, "--json").stdout)
    assert rows[0]["fewer_up"] == 1
    assert all(row["fewer_up"] == pytest.approx(rows[0]["up_bytes"] / row["up_bytes"]) for row in rows)


def test_version_and_help():
    assert call("--version").stdout == f"sparing {sparing.__version__}\n"
    commands = [[command.name or command.callback.__name__] for command in app.registered_commands]
    assert len(commands) >= 11
    for command in ([], *commands):
        result = call(*command, "--help")
        assert result.exit_code == 0
        assert "usage" in result.stdout.lower()


BAD = {
    "unknown method": (["method=topkk"], ["'topkk'", "did you mean 'topk'"]),
    "unknown option": (["method={topk: {ration: 0.1}}"], ["'ration'", "did you mean 'ratio'"]),
    "unknown key": (["roundz=5"], ["'roundz'", "did you mean 'rounds'"]),
    "unknown inner key": (["local.lrr=5"], ["'local.lrr'", "did you mean 'lr'"]),
    "unknown file": (["nowhere.yaml"], ["nowhere.yaml", "check the path"]),
    "two files": (["a.yaml", "b.yaml"], ["'a.yaml'", "'b.yaml'"]),
    "negative count": (["rounds=-3"], ["rounds", "-3", "greater than 0"]),
    "negative clients": (["task.clients=-1"], ["task.clients", "-1"]),
    "share above one": (["sample=1.5"], ["sample", "1.5", "between 0 and 1"]),
    "ratio above one": (["method={topk: {ratio: 2}}"], ["topk.ratio", "2", "at most 1"]),
    "more than exist": (["sample=50"], ["50", "there are 4", "lower sample"]),
    "empty cohort": (["sample=0.01"], ["sample", "0.01", "raise"]),
    "unsound": (["method=int8+fp16"], ["'fp16'", "keep one"]),
    "nothing to remember": (["method=memory"], ["memory", "topk"]),
    "no such layer": (["method={personal: {layers: [heat]}}"], ["'heat'", "did you mean 'head'"]),
    "unknown data": (["task.data=digit"], ["'digit'", "did you mean 'digits'"]),
    "unknown model": (["task.model=cmn"], ["'cmn'", "did you mean 'cnn'"]),
    "unknown split": (["task.split=dirichelt"], ["'dirichelt'", "did you mean 'dirichlet'"]),
    "unknown device": (["device=gpux"], ["'gpux'", "cpu"]),
    "not a number": (["local.lr=fast"], ["local.lr", "'fast'"]),
    "loss turns NaN": (["local.lr=1e30", "rounds=2"], ["client", "round 1", "lower lr"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(name):
    items, words = BAD[name]
    files = [item for item in items if item.endswith(".yaml")]
    rest = [item for item in items if item not in files]
    refused(call("run", *files, *SMALL, *rest, "--out", "o"), *words)
    assert not Path("o").exists() or name == "loss turns NaN"


def test_broken_yaml_names_the_file_and_the_line():
    Path("study.yaml").write_text("rounds: 5\nlocal: {lr: 0.1\n")
    refused(call("run", "study.yaml"), "study.yaml", "line")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_taken_run_folder_is_left_alone(ran):
    before = contents(ran)
    refused(call("run", *SMALL, "--out", ran), "already holds a run", "sparing resume", "another folder")
    assert contents(ran) == before


@pytest.mark.parametrize("folder", ["missing", "empty"])
def test_resume_without_a_run(folder):
    Path("empty").mkdir()
    refused(call("resume", folder), folder, "config.yaml", "check the path")
    assert not list(Path("empty").iterdir())


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_truncated_checkpoint_is_refused(ran, size):
    path = ran / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    before = contents(ran)
    refused(call("resume", ran), "checkpoint.safetensors", "cut short or altered", "another copy")
    assert contents(ran) == before


def test_an_altered_checkpoint_is_refused(ran):
    path = ran / "checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    refused(call("resume", ran), "checkpoint.safetensors", "digest")


def test_a_checkpoint_of_another_config_is_refused(ran):
    config = yaml.safe_load((ran / "config.yaml").read_text())
    (ran / "config.yaml").write_text(yaml.safe_dump({**config, "seed": 7}))
    before = contents(ran)
    refused(call("resume", ran), "another config", "config.yaml", "undo the change")
    assert contents(ran) == before


def test_a_wrong_flag_is_typers_business():
    result = call("run", "--oot", "x")
    assert result.exit_code == 2
    assert "--oot" in result.stderr


def test_a_bug_shows_its_traceback(monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr("sparing.cli.watched_runs.start_run", broken)
    assert isinstance(call("run").exception, RuntimeError)


def process(*args: str) -> subprocess.Popen:
    command = [sys.executable, "-c", STOPPABLE, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


BUSY = """
import signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
from sparing.core.threads import work_side_by_side
from sparing.cli.interrupt import INTERRUPT

def work(i):
    print("at work", flush=True)
    threading.Event().wait(600)

INTERRUPT.listen()
with INTERRUPT.advising(lambda: "go on so"):
    work_side_by_side(range(2), work, print, 2)
"""


def wait_for(child: subprocess.Popen, reached: Callable[[], bool]) -> None:
    while not reached():
        assert child.poll() is None
        time.sleep(0.02)


def press(child: subprocess.Popen) -> None:
    """Ctrl-C until it ends: one that comes while another is not heard yet is lost."""
    for _ in range(600):
        child.send_signal(signal.SIGINT)
        try:
            child.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        return


def test_a_second_ctrl_c_ends_the_process_whatever_its_threads_do():
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    press(child)
    _, err = child.communicate(timeout=300)
    assert (child.returncode, err) == (130, "sparing: stopped at once; go on so\n")


def test_ctrl_c_again_and_again_leaves_one_line_and_a_run_that_goes_on():
    child = process("run", *SMALL[:2], "rounds=100000", "plan.path=loop", "plan.threads=2", "--out", "pressed")
    wait_for(child, Path("pressed/config.yaml").exists)
    press(child)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 130
    stands = r"(round \d+ of 100000 is|no round is) saved( yet)?"
    assert re.fullmatch(rf"sparing: stopped( at once)?; {stands}, continue with: sparing resume pressed\n", err)

    class Enough(Exception):
        pass

    def enough(record):
        raise Enough

    with pytest.raises(Enough):
        sparing.resume("pressed", loggers=[enough])


def test_a_ctrl_c_that_python_loses_in_a_finaliser_stops_the_run_after_its_round():
    command = ["run", *SMALL, "rounds=50", "checkpoint=1", "--out", "lost"]
    ended = subprocess.run([sys.executable, "-c", SWALLOWING, *command], capture_output=True, text=True)
    assert ended.returncode == 130, ended
    assert "round 2 of 50 is saved, continue with: sparing resume lost" in ended.stderr


def test_ctrl_c_says_what_is_saved_and_how_to_go_on():
    child = process("run", *SMALL, "rounds=100000", "plan.path=loop", "--out", "long")
    assert child.stdout is not None
    rounds = Path("long/rounds.csv")
    wait_for(child, lambda: rounds.exists() and len(rounds.read_text().splitlines()) >= 3)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=300)
    assert child.returncode == 130
    assert err.startswith("sparing: stopped; round ")
    assert err.endswith("of 100000 is saved, continue with: sparing resume long\n")
    saved = int(err.split()[3])
    assert len(Path("long/rounds.csv").read_text().splitlines()) - 1 >= saved
