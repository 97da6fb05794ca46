"""Run folders and resuming: law run(20) == run(7); killed; resume(13), client states and residuals included."""

import csv
import json
import shutil

import pytest
import torch
import yaml
from safetensors import safe_open
from torch import nn

import sparing
from sparing.core.errors import CheckpointError, ConfigError, DataError, MethodError, SparingError, TrainingError
from sparing.models import build_network
from sparing.runs.loop import _evenly_spread, cohort_size
from sparing.runs.results import ROUND_COLUMNS, worst_decile
from support import Stop, stop_after

TASK = {"clients": 10, "model": "mlp"}
METHOD = "psfed+topk+int8+memory"
OPTIONS = {"rounds": 6, "sample": 5, "local": {"epochs": 1, "batch": 32}, "seed": 3}


@pytest.mark.parametrize("bank", ["memory", "file"])
@pytest.mark.parametrize("engine", ["vector", "debug"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_broken_run_resumes_to_the_same_bits(tmp_path, bank, engine, every):
    options = {**OPTIONS, "plan": {"bank": bank}, "engine": engine, "checkpoint": every}
    whole = sparing.run(TASK, METHOD, out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        sparing.run(TASK, METHOD, out=tmp_path / "broken", loggers=[stop_after(3)], **options)
    assert not (tmp_path / "broken/summary.json").exists()
    resumed = sparing.resume(tmp_path / "broken")
    assert resumed.model_sha256 == whole.model_sha256
    assert (resumed.up_bytes, resumed.down_bytes) == (whole.up_bytes, whole.down_bytes)
    assert (tmp_path / "broken/ledger.csv").read_text() == (tmp_path / "whole/ledger.csv").read_text()
    assert [r.accuracy for r in resumed.table] == [r.accuracy for r in whole.table]
    assert resumed.rounds == len(resumed.table) == 6


def test_resuming_before_the_first_checkpoint_starts_over(tmp_path):
    options = {**OPTIONS, "checkpoint": 5}
    whole = sparing.run(TASK, METHOD, **options)
    with pytest.raises(Stop):
        sparing.run(TASK, METHOD, out=tmp_path / "a", loggers=[stop_after(2)], **options)
    assert sparing.resume(tmp_path / "a").model_sha256 == whole.model_sha256


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = sparing.run(TASK, METHOD, out=tmp_path / "a", **OPTIONS)
    again = sparing.resume(tmp_path / "a")
    assert again.summary == first.summary


def test_what_a_run_folder_holds(tmp_path):
    result = sparing.run(TASK, METHOD, out=tmp_path / "a", **OPTIONS)
    folder = tmp_path / "a"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["rounds"] == 6
    assert config["plan"]["path"] in ("loop", "stacked"), "the chosen plan is written down"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == result.summary
    wanted = "task method rounds seed accuracy best_accuracy personal_accuracy worst_decile loss up_bytes down_bytes"
    assert list(summary) == [*wanted.split(), "seconds", "model_sha256"]
    rows = list(csv.DictReader((folder / "rounds.csv").read_text().splitlines()))
    assert list(rows[0]) == ROUND_COLUMNS
    assert [int(r["round"]) for r in rows] == [1, 2, 3, 4, 5, 6]
    assert sum(int(r["up_bytes"]) for r in rows) == result.up_bytes
    ledger = list(csv.DictReader((folder / "ledger.csv").read_text().splitlines()))
    assert len(ledger) == 6 * 5 * 2
    for direction, total in (("up", result.up_bytes), ("down", result.down_bytes)):
        kinds = ("value", "index", "scale", "header", "notes")
        assert sum(int(r[k]) for r in ledger if r["direction"] == direction for k in kinds) == total
    with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
        assert any(name.startswith("model/") for name in file.keys())  # noqa: SIM118


def test_results_have_the_fields_of_the_summary_as_attributes():
    result = sparing.run(TASK, "fedavg", **OPTIONS)
    assert result.accuracy == result.table[-1].accuracy
    assert result.best_accuracy == max(r.accuracy for r in result.table)
    build_network("mlp", (1, 8, 8), 10).load_state_dict(result.model)


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    a, b = (sparing.run(TASK, METHOD, **OPTIONS) for _ in range(2))
    c = sparing.run(TASK, METHOD, **{**OPTIONS, "seed": 4})
    assert a.model_sha256 == b.model_sha256 != c.model_sha256


def own_task(**changes):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=g)
    y = (x.sum(dim=1) > 0).long()
    train = [(x[i : i + 10], y[i : i + 10]) for i in range(0, 40, 10)]
    return sparing.Task(**{"model": lambda: nn.Linear(3, 2), "train": train, "test": (x, y), **changes})


def test_ones_own_model_and_data(tmp_path):
    result = sparing.run(own_task(), "topk+memory", rounds=30, sample=1.0, local={"lr": 0.5}, out=tmp_path / "a")
    assert result.accuracy > 0.9
    assert result.personal_accuracy != result.personal_accuracy, "one test set for all: nothing personal to measure"
    with pytest.raises(ConfigError, match="pass it again"):
        sparing.resume(tmp_path / "a")
    assert sparing.resume(tmp_path / "a", task=own_task()).model_sha256 == result.model_sha256


def broken_run(tmp_path, **options):
    with pytest.raises(Stop):
        sparing.run(TASK, METHOD, out=tmp_path / "a", loggers=[stop_after(2)], **{**OPTIONS, **options})
    return tmp_path / "a"


def test_a_checkpoint_of_another_config_is_refused_and_kept(tmp_path):
    folder = broken_run(tmp_path)
    config = folder / "config.yaml"
    good = config.read_text()
    config.write_text(good.replace("lr: 0.1\n", "lr: 0.2\n"))
    before = (folder / "checkpoint.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="another config"):
        sparing.resume(folder)
    assert (folder / "checkpoint.safetensors").read_bytes() == before
    config.write_text(good)
    sparing.resume(folder)


@pytest.mark.parametrize("text", ["", "- a", "a: [", "rounds: -1"])
def test_a_broken_config_is_refused_in_words(tmp_path, text):
    folder = broken_run(tmp_path)
    (folder / "config.yaml").write_text(text)
    with pytest.raises(SparingError):
        sparing.resume(folder)


def test_another_task_is_refused(tmp_path):
    with pytest.raises(Stop):
        sparing.run(own_task(), "topk", rounds=3, sample=2, out=tmp_path / "a", loggers=[stop_after(1)])
    smaller = own_task(train=[(torch.ones(4, 3), torch.zeros(4).long())] * 4)
    with pytest.raises(CheckpointError, match="another task: the training samples changed"):
        sparing.resume(tmp_path / "a", task=smaller)


DAMAGE = ["truncated", "altered", "slots altered", "table shortened", "table altered", "slots missing"]


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_noticed_and_named(tmp_path, damage):
    folder = broken_run(tmp_path, plan={"bank": "file"})
    if damage == "slots missing":
        (folder / "clients.slots").unlink()
    elif damage == "table shortened":
        (folder / "rounds.csv").write_text("round\n")
    elif damage == "table altered":
        size = (folder / "rounds.csv").stat().st_size
        (folder / "rounds.csv").write_text("x" * size)
    else:
        path = folder / ("clients.slots" if "slots" in damage else "checkpoint.safetensors")
        data = bytearray(path.read_bytes())
        if damage == "truncated":
            data = data[: len(data) // 2]
        else:
            for i in range(200, len(data), 1000):
                data[i] ^= 1
        path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        sparing.resume(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path):
    folder = broken_run(tmp_path)
    copy = shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(ConfigError, match="already holds a run; continue it with `sparing resume"):
        sparing.run(TASK, METHOD, out=folder, **OPTIONS)
    for file in copy.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()


def test_nothing_is_written_for_a_study_that_is_refused(tmp_path):
    stray = [{"personal": {"layers": ["x"]}}]
    for method, error in (("memory", MethodError), ("nope", ConfigError), (stray, MethodError)):
        with pytest.raises(error):
            sparing.run(TASK, method, out=tmp_path / "a", **OPTIONS)
    with pytest.raises(ConfigError, match="sample asks for 11 clients a round, but there are 10"):
        sparing.run(TASK, out=tmp_path / "a", **{**OPTIONS, "sample": 11})
    with pytest.raises(ConfigError, match=r"sample 0.01 of 10 clients is nobody"):
        sparing.run(TASK, out=tmp_path / "a", **{**OPTIONS, "sample": 0.01})
    assert not (tmp_path / "a").exists()


def test_a_loss_that_turns_nan_keeps_what_was_saved(tmp_path):
    with pytest.raises(TrainingError, match=r"lr|clip"):
        sparing.run(own_task(), rounds=50, sample=1.0, local={"lr": 1e30}, out=tmp_path / "a")
    assert (tmp_path / "a/config.yaml").exists()


def test_bad_data_is_refused():
    x, y = torch.ones(4, 3), torch.zeros(4).long()
    with pytest.raises(DataError, match="client 1 has no samples"):
        own_task(train=[(x, y), (x[:0], y[:0])])
    with pytest.raises(DataError, match="client 1"):
        own_task(train=[(x, y), (x * float("nan"), y)])


def test_a_share_or_a_count_of_clients():
    assert cohort_size(50, 0.2) == cohort_size(50, 10) == 10
    assert cohort_size(50, 1) == 1, "a whole number is a count"
    assert cohort_size(50, 1.0) == 50


def test_worst_decile_and_spread():
    assert worst_decile(torch.arange(20) / 20) == pytest.approx((0 + 0.05) / 2)
    assert worst_decile(torch.tensor([0.5])) == 0.5
    assert _evenly_spread(5, 10).tolist() == [0, 1, 2, 3, 4]
    assert _evenly_spread(1000, 3).tolist() == [0, 500, 999]


def test_set_seed_seeds_torch():
    sparing.set_seed(1)
    a = torch.rand(2)
    sparing.set_seed(1)
    assert torch.equal(a, torch.rand(2))
