"""Every moment of a run can be resumed, and what was altered on the way is refused by name, never taken over."""

import csv
import json
import random
import subprocess
import sys

import pytest
import torch
from torch import nn

import sparing
from sparing.core.errors import CheckpointError, ConfigError, SparingError
from sparing.reports.run_folders import read_run_folder
from sparing.runs.files import checkpoint, run_folder
from sparing.runs.start import resume
from support import Stop, stop_after

TASK = {"clients": 4, "model": "mlp"}
STUDY = {"rounds": 4, "sample": 2, "seed": 1, "local": {"steps": 1}}
METHOD = "topk+memory"


@pytest.fixture
def broken(tmp_path):
    """A run that stopped after round 2."""
    with pytest.raises(Stop):
        sparing.run(TASK, METHOD, out=tmp_path / "a", loggers=[stop_after(2)], **STUDY)
    return tmp_path / "a"


WHOLE = {}


def whole():
    if not WHOLE:
        WHOLE["sha"] = sparing.run(TASK, METHOD, **STUDY).model_sha256
    return WHOLE["sha"]


@pytest.mark.parametrize("step", ["tables", "checkpoint", "config"])
def test_a_start_that_is_broken_off_can_be_made_again(tmp_path, monkeypatch, step):
    """A kill at any step of making the folder: there is no run yet, and the folder is free to begin one in."""

    def killed(*args, **options):
        raise KeyboardInterrupt

    where = {
        "tables": (run_folder.GrowingTable, "append"),
        "checkpoint": (checkpoint, "_checkpoint_header"),
        "config": (run_folder.RunFolder, "publish"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*where[step], killed)
        with pytest.raises(KeyboardInterrupt):
            sparing.run(TASK, METHOD, out=tmp_path / "a", **STUDY)
    with pytest.raises(ConfigError, match="holds no run"):
        resume(tmp_path / "a")
    assert sparing.run(TASK, METHOD, out=tmp_path / "a", **STUDY).model_sha256 == whole()


def test_a_run_that_is_killed_in_its_first_round_goes_on(tmp_path, monkeypatch):
    from sparing.engines.vector import Vector

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Vector, "start", killed)
        with pytest.raises(KeyboardInterrupt):
            sparing.run(TASK, METHOD, out=tmp_path / "a", **STUDY)
    assert run_folder.saved_round(tmp_path / "a") == 0
    assert resume(tmp_path / "a").model_sha256 == whole()


def test_a_checkpoint_that_is_gone_is_asked_for(broken):
    (broken / "checkpoint.safetensors").unlink()
    before = (broken / "rounds.csv").read_bytes()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        resume(broken)
    assert (broken / "rounds.csv").read_bytes() == before


def test_what_training_left_is_never_overwritten(broken):
    (broken / "config.yaml").unlink()
    for gone, named in ((), "rounds.csv"), (("rounds.csv",), "ledger.csv"):
        for name in gone:
            (broken / name).unlink()
        with pytest.raises(ConfigError, match=rf"holds {named} of a run, but no config.yaml"):
            sparing.run(TASK, METHOD, out=broken, **STUDY)
    for name in ("ledger.csv", "clients.csv", "metrics.csv", "pictures.jsonl"):
        (broken / name).unlink()
    with pytest.raises(ConfigError, match=r"holds checkpoint.safetensors of a run"):
        sparing.run(TASK, METHOD, out=broken, **STUDY)


FILES = ("rounds.csv", "ledger.csv", "clients.csv", "metrics.csv", "pictures.jsonl", "environment.json", "log.txt")


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_in_a_file_is_refused_by_name(broken, name):
    good, draw = (broken / name).read_bytes(), random.Random(name)
    marks = run_folder.read_checkpoint_meta(broken)["files"]
    for place in (0, marks[name]["bytes"] - 1, draw.randrange(marks[name]["bytes"])):
        bad = bytearray(good)
        bad[place] ^= 1 << draw.randrange(8)
        (broken / name).write_bytes(bad)
        with pytest.raises(CheckpointError, match=f"{name} was altered"):
            resume(broken)
        assert (broken / name).read_bytes() == bad, "nothing is cut before all is known to be sound"
    (broken / name).write_bytes(good)
    assert resume(broken).model_sha256 == whole()


def test_a_number_that_was_changed_is_not_compared(broken):
    """The issue's case: one bit made a best accuracy of 1.131."""
    path = broken / "rounds.csv"
    rows = list(csv.reader(path.read_text().splitlines()))
    rows[1][rows[0].index("accuracy")] = "1.131"
    good = path.read_text()
    path.write_text("\n".join(map(",".join, rows)) + "\n")
    for look in (resume, read_run_folder):
        with pytest.raises(CheckpointError, match=r"rounds.csv was altered|rounds.csv is shorter"):
            look(broken)
    path.write_text(good)
    assert len(read_run_folder(broken).table) == 2
    config = broken / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.1\n", "lr: 0.3\n"))
    with pytest.raises(CheckpointError, match=r"config.yaml was altered"):
        read_run_folder(broken)


def test_a_digest_costs_the_same_after_many_rounds(tmp_path):
    """A checkpoint hashes what was appended since the last one, not the tables anew."""
    table = run_folder.GrowingTable(tmp_path / "t")
    table.create("head\n")
    table.append("x" * 10_000)
    before, hashed, sha256 = table.mark(), [], table.digest

    class Counting:
        def update(self, data):
            hashed.append(len(data))
            sha256.update(data)

        def hexdigest(self):
            return sha256.hexdigest()

    table.digest = Counting()
    table.append("y\n")
    assert table.mark()["bytes"] == before["bytes"] + 2
    assert hashed == [2]
    again = run_folder.GrowingTable(tmp_path / "t")
    again.restore(table.mark())
    assert again.digest.hexdigest() == table.digest.hexdigest()


def own_task(**changes):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=g)
    y = (x.sum(dim=1) > 0).long()
    train = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)]
    return sparing.Task(**{"model": still, "train": train, "test": (x, y), "probe": (x[:4], y[:4]), **changes})


def still():
    """A model that gives zeros: there, cross entropy with and without smoothing are the same."""
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    return net


def plain(output, y):
    return nn.functional.cross_entropy(output, y, reduction="none")


def smoothed(output, y):
    return nn.functional.cross_entropy(output, y, reduction="none", label_smoothing=0.2)


X, Y = torch.ones(8, 3), torch.zeros(8).long()
OTHERS = {
    "the test samples": {"test": (X, Y)},
    "the test samples ": {"test_all": (X, Y)},
    "the loss": {"loss": smoothed},
    "the initial model": {"model": lambda: nn.Linear(3, 2)},
    "the server's probe samples": {"probe": (X, Y)},
    "which clients are held out": {"held_out": [1]},
}


@pytest.mark.parametrize("said", OTHERS)
def test_another_task_is_refused_and_it_is_said_what_changed(tmp_path, said):
    options = {"rounds": 3, "sample": 2, "local": {"steps": 1}}
    with pytest.raises(Stop):
        sparing.run(own_task(loss=plain), out=tmp_path / "a", loggers=[stop_after(1)], **options)
    with pytest.raises(CheckpointError, match=f"another task: {said.strip()} changed"):
        resume(tmp_path / "a", task=own_task(**{"loss": plain, **OTHERS[said]}))
    resume(tmp_path / "a", task=own_task(loss=lambda output, y: plain(output, y)))  # by what it gives, not its name


def test_other_validation_samples_are_another_task(tmp_path):
    from sparing.data.clients import Clients

    options = {"rounds": 2, "sample": 2, "local": {"steps": 1}}
    some, other = (Clients.of([(X * i, Y)] * 4) for i in (1, 2))
    with pytest.raises(Stop):
        sparing.run(own_task(validation=some), out=tmp_path / "a", loggers=[stop_after(1)], **options)
    with pytest.raises(CheckpointError, match="the validation samples changed"):
        resume(tmp_path / "a", task=own_task(validation=other))
    resume(tmp_path / "a", task=own_task(validation=some))


def test_another_way_to_measure_accuracy_is_another_task(tmp_path, monkeypatch):
    from sparing.runs import identity

    with pytest.raises(Stop):
        sparing.run(own_task(), out=tmp_path / "a", loggers=[stop_after(1)], rounds=2, sample=2)
    monkeypatch.setattr(identity, "accuracy", lambda output, y: torch.zeros(len(y)))
    with pytest.raises(CheckpointError, match="how accuracy is measured changed"):
        resume(tmp_path / "a", task=own_task())


def test_another_trace_is_another_run(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("client,from,to\n0,1,9\n1,1,9\n")
    with pytest.raises(Stop):
        sparing.run(TASK, out=tmp_path / "a", loggers=[stop_after(1)], fleet={"trace": str(trace)}, **STUDY)
    trace.write_text("client,from,to\n0,1,9\n1,1,9\n2,1,9\n3,1,9\n")
    with pytest.raises(CheckpointError, match=r"fleet.trace or fleet.capacity changed"):
        resume(tmp_path / "a")


FULL = """
import resource, sys
import sklearn.datasets
import sparing
from sparing.core.errors import SparingError
task = {"clients": 4, "model": {"mlp": {"hidden": [32]}}}
for size in map(int, sys.argv[1:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    try:
        sparing.run(task, "fedavg", out=f"run-{size}", rounds=400, sample=2, seed=1, local={"steps": 1},
                    evaluate={"every": 400}, plan={"path": "loop"})
    except SparingError as error:
        print(error)
"""


def test_a_disk_that_is_full_is_said_in_one_sentence(tmp_path):
    """A limit on the size of a file stands for the disk: it hits while the folder is made, or a table grows."""
    sizes = ["10", "200", "1000", "9000", "14000"]
    command = [sys.executable, "-c", FULL, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert len(lines) == len(sizes)
    assert all("could not be written (File too large)" in line for line in lines)
    assert "checkpoint.safetensors could" in lines[-2], "all else of the folder is smaller"
    assert ".csv could" in lines[-1], "a table grew beyond it"


def test_a_summary_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/.summary.json.part").mkdir()
    with pytest.raises(SparingError, match=r"summary.json could not be written"):
        sparing.run(TASK, METHOD, out=tmp_path / "a", **STUDY)
    (tmp_path / "a/.summary.json.part").rmdir()
    assert resume(tmp_path / "a").model_sha256 == whole()


def test_the_memory_bank_and_the_file_bank_survive_altered_slots(tmp_path):
    with pytest.raises(Stop):
        sparing.run(TASK, METHOD, out=tmp_path / "a", loggers=[stop_after(2)], **STUDY, plan={"bank": "file"})
    path = tmp_path / "a/clients.slots"
    data = bytearray(path.read_bytes())
    for i in range(0, len(data), 4096):
        data[i] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"clients.slots .* was altered"):
        resume(tmp_path / "a")


def test_json_that_is_no_checkpoint_is_not_believed(broken):
    (broken / "checkpoint.safetensors").write_bytes(json.dumps({}).encode())
    with pytest.raises(CheckpointError, match=r"checkpoint.safetensors is cut short or altered"):
        read_run_folder(broken)
