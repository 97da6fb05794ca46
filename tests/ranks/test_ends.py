"""How runs of several ranks end, and go on: with other numbers of ranks, after a rank died, after a mistake."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import sparing
from ranks.players import end_of, start_ranks

TASK = {"data": "digits", "clients": 9, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [12]}}}
STUDY: dict[str, Any] = {
    "task": TASK,
    "method": ["psfed", "topk", "memory"],
    "rounds": 4,
    "sample": 5,
    "local": {"steps": 2, "lr": 0.05},
    "evaluate": {"every": 4, "clients": 7},
    "plan": {"path": "loop"},
}


def alone(study: dict[str, Any]) -> str:
    given = dict(study)
    return sparing.run(given.pop("task"), given.pop("method"), **given).model_sha256


def write_study(folder: Path, **other: Any) -> Path:
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(STUDY | other))
    return path


@pytest.mark.parametrize(("worlds", "bank"), [((2, 3, 1), "file"), ((1, 2), "memory"), ((3, 2), "memory")], ids=str)
def test_a_checkpoint_goes_on_with_any_number_of_ranks(worlds, bank, tmp_path):
    """Each plays a part of the rounds, and is killed in the middle."""
    study = STUDY | {"plan": {"path": "loop", "bank": bank}, "rounds": 2 * len(worlds)}
    path, run = write_study(tmp_path, **study), tmp_path / "run"
    command = ["run", str(path), "--out", str(run)]
    for world in worlds[:-1]:
        done = _rounds(run)
        processes = start_ranks(world, ["-m", "sparing", *command])
        _wait_for(lambda done=done: _rounds(run) > done, processes)
        processes[-1].send_signal(signal.SIGKILL)
        end_of(processes)
        command = ["resume", str(run)]
    for code, _, said in end_of(start_ranks(worlds[-1], ["-m", "sparing", *command])):
        assert code == 0, said
    summary = yaml.safe_load((run / "summary.json").read_text())
    assert summary["model_sha256"] == alone(study)


def _rounds(run: Path) -> int:
    table = run / "rounds.csv"
    return max(0, len(table.read_text().splitlines()) - 1) if table.exists() else 0


def _wait_for(there, processes, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not there() and time.monotonic() < until and all(one.poll() is None for one in processes):
        time.sleep(random.uniform(0.001, 0.02))


def test_a_rank_that_dies_ends_the_others_in_one_sentence(tmp_path):
    path = write_study(tmp_path, rounds=100_000)
    processes = start_ranks(3, ["-m", "sparing", "run", str(path), "--out", str(tmp_path / "run")])
    _wait_for(lambda: _rounds(tmp_path / "run") > 1, processes)
    os.kill(processes[2].pid, signal.SIGKILL)
    ends = end_of(processes)
    assert [code for code, _, _ in ends] == [2, 2, -signal.SIGKILL]
    said = [line for _, _, text in ends for line in text.splitlines() if line.startswith("sparing:")]
    assert said == [
        "sparing: rank 2 has died, so this run of 3 ranks ends; go on with `sparing resume`, with any number of ranks"
    ]


@pytest.mark.parametrize(
    ("items", "why"),
    [
        (["methd=fedavg"], "methd"),
        (["sample=1"], "2 ranks for 1 clients a round, so that some would have none; start at most 1"),
        (["engine=debug"], "engine is debug, which is one process, and here are 2 ranks; set engine=vector"),
        (["local.lr=1e30"], "round 1: the training loss became nan"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_mistakes_are_said_once(items, why, tmp_path):
    path = write_study(tmp_path)
    ends = end_of(start_ranks(2, ["-m", "sparing", "run", str(path), *items, "--out", str(tmp_path / "run")]))
    assert [code for code, _, _ in ends] == [2, 2]
    said = [line for _, _, text in ends for line in text.splitlines() if line.startswith("sparing:")]
    assert len(said) == 1, said
    assert why in said[0]


def test_a_command_of_one_process_is_refused_once():
    ends = end_of(start_ranks(2, ["-m", "sparing", "demo"]))
    assert [code for code, _, _ in ends] == [2, 2]
    assert [text for _, _, text in ends] == [
        "sparing: `sparing demo` is one process, and here are 2 ranks; start it alone\n",
        "",
    ]


def test_ctrl_c_is_answered_once(tmp_path):
    path = write_study(tmp_path, rounds=100_000)
    processes = start_ranks(2, ["-m", "sparing", "run", str(path), "--out", str(tmp_path / "run")])
    _wait_for(lambda: _rounds(tmp_path / "run") > 1, processes)
    for process in processes:
        process.send_signal(signal.SIGINT)
    ends = end_of(processes)
    assert [code for code, _, _ in ends] == [130, 130]
    said = [line for _, _, text in ends for line in text.splitlines() if line.strip()]
    assert len(said) == 1, said
    assert "continue with: sparing resume" in said[0]


def test_a_rank_that_is_ending_can_be_told_to_end(tmp_path):
    """As torchrun does to those that are left."""
    path = write_study(tmp_path)
    first, other = start_ranks(2, ["-m", "sparing", "run", str(path), "methd=fedavg"])
    other.kill()  # so that the first waits a while for it
    assert first.stderr is not None
    said = first.stderr.readline()
    first.send_signal(signal.SIGTERM)
    (code, _, more), _ = end_of([first, other], 30)
    assert "methd" in said
    assert (code, more) == (2, "")


def test_a_script_of_ones_own_ends_in_order(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, sparing\n"
        "x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))\n"
        "y = (x[:, 0] > 0).long()\n"
        "clients = [(x[i::8], y[i::8]) for i in range(8)]\n"
        "task = sparing.Task(lambda: torch.nn.Linear(4, 2), train=clients, test=(x, y))\n"
        "for method in ('fedavg', 'topk+memory'):\n"
        "    sparing.run(task, method, rounds=5, sample=4)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    for _ in range(2):  # most of them aborted while threads of torch outlived the interpreter
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr


def test_a_sweep_has_ranks_as_workers(tmp_path):
    path = write_study(tmp_path, rounds=2, task=TASK | {"validation": 0.3}, sweep={"local.lr": [0.01, 0.05, 0.1]})
    ends = end_of(start_ranks(2, ["-m", "sparing", "sweep", str(path), "--out", str(tmp_path / "sweep"), "--json"]))
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert len(list((tmp_path / "sweep").glob("*/summary.json"))) == 3
    assert json.loads(ends[0][1])["trials"]
    assert not ends[1][1]
