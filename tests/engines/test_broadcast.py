"""A broadcast in real runs: both engines, the same model and the same ledger; broken runs go on to the same bits."""

import pytest
import torch
from torch import nn

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.tree import layout_of
from sparing.engines import reference
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list

STUDY = {
    "rounds": 6,
    "sample": 3,
    "seed": 4,
    "local": {"steps": 2},
    "evaluate": {"every": 6},
    "fleet": {"dropout": 0.4},
}
METHODS = [
    "broadcast",
    "stc",
    ["lowrank", {"broadcast": {"by": "lowrank"}}],
    [{"broadcast": {"by": [{"topk": {"ratio": 0.02}}, "int8", "tight"]}}],
    ["broadcast", "personal", "scaffold"],
    [{"fedscr": {"adaptive": True}}, "median", "broadcast"],
    ["psfed", "broadcast"],
    ["heterofl", "broadcast"],
    ["pfedsim", {"broadcast": {"by": "randk"}}],
]


def network():
    """With buffers of both kinds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 3)
        )


def task(clients=8):
    g = torch.Generator().manual_seed(1)
    data = [(torch.randn(6 + k, 2, 4, 4, generator=g), torch.arange(6 + k) % 3) for k in range(clients)]
    return sparing.Task(network, train=data, test=data)


def ledger(folder):
    return (folder / "ledger.csv").read_text()


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_both_engines_write_the_same_ledger(method, tmp_path):
    runs = {
        engine: sparing.run(
            task(), method, out=tmp_path / engine, engine=engine, plan={"path": "loop", "chunk": 2}, **STUDY
        )
        for engine in ("vector", "debug")
    }
    fast, plain = runs.values()
    assert fast.model_sha256 == plain.model_sha256
    assert ledger(tmp_path / "vector") == ledger(tmp_path / "debug")
    down = [line.split(",") for line in ledger(tmp_path / "debug").splitlines() if ",down," in line]
    if "psfed" not in method and "heterofl" not in method:
        assert len({tuple(row[3:]) for row in down}) > 3, "whole models and updates"
    assert [r.metrics for r in fast.table] == [pytest.approx(r.metrics, nan_ok=True) for r in plain.table]


def test_everyone_may_vanish(tmp_path):
    study = STUDY | {"sample": 2, "rounds": 8, "fleet": {"dropout": 0.7}}
    fast, plain = (
        sparing.run(task(4), "broadcast", out=tmp_path / engine, engine=engine, plan={"path": "loop"}, **study)
        for engine in ("vector", "debug")
    )
    assert 0 in [r.clients for r in fast.table]
    assert fast.model_sha256 == plain.model_sha256
    assert ledger(tmp_path / "vector") == ledger(tmp_path / "debug")


def test_who_was_here_gets_the_last_update_and_an_empty_parcel():
    study = {"rounds": 4, "sample": 1.0, "seed": 4, "local": {"steps": 1}, "evaluate": {"every": 4}}
    first, *rows = sparing.run({"data": "digits", "clients": 3}, "stc", **study).table
    told = [r.metrics["broadcast_bytes"] for r in (first, *rows)]
    assert first.down_bytes > 3 * 50_000
    assert [row.down_bytes for row in rows] == [3 * (size + 19) for size in told[:-1]]


@pytest.mark.parametrize("engine", ["vector", "debug"])
def test_a_broken_run_resumes_to_the_same_bits_and_bytes(tmp_path, engine):
    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 4:
            raise Stop

    study = STUDY | {"rounds": 7, "checkpoint": 3, "engine": engine}
    method = ["personal", {"broadcast": {"by": "lowrank"}}]
    whole = sparing.run(task(), method, out=tmp_path / "whole", **study)
    with pytest.raises(Stop):
        sparing.run(task(), method, out=tmp_path / "broken", loggers=[stop], **study)
    resumed = sparing.resume(tmp_path / "broken", task=task())
    assert resumed.model_sha256 == whole.model_sha256
    assert ledger(tmp_path / "broken") == ledger(tmp_path / "whole")


def test_the_plain_engine_sees_when_a_client_has_another_model(monkeypatch):
    real = reference.copy_of

    def wrong(*given):
        return {name: x + 1 if x.is_floating_point() else x for name, x in real(*given).items()}

    monkeypatch.setattr(reference, "copy_of", wrong)
    with pytest.raises(sparing.SparingError, match=r"round 2, client 0, reading.*differs from the server's"):
        sparing.run(task(2), "broadcast", engine="debug", rounds=3, sample=1.0, local={"steps": 1})


REFUSED = {
    "changes the share": [{"broadcast": {"by": "psfed"}}],
    "changes the blend": [{"broadcast": {"by": ["topk", "fedavgm"]}}],
    "changes the broadcast": [{"broadcast": {"by": "stc"}}],
    "writes every value as it is": [{"broadcast": {"by": "fedavg"}}],
    "both write the server's update; drop one": ["stc", "broadcast"],
    "'ecsq' needs values, and a quantiser before it gives codes; put it first": [{"broadcast": {"by": "int8+ecsq"}}],
    "can be larger than the update": [{"broadcast": {"by": "ternary"}}],
    "'lowrank' factors whole matrices, but clients get parts": ["psfed", {"broadcast": {"by": "lowrank"}}],
    "factors whole matrices, but clients get parts of them": ["heterofl", {"broadcast": {"by": "powersgd"}}],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_makes_no_sense_is_refused(words):
    with pytest.raises(MethodError, match=words):
        compose(layout_of(network()), *recipes_from_entries(method_list(REFUSED[words])))


def test_options_inside_by_are_checked():
    with pytest.raises(ConfigError, match="'topk' has no option 'ratoi'"):
        recipes_from_entries([{"broadcast": {"by": [{"topk": {"ratoi": 1}}]}}])
    with pytest.raises(ConfigError, match="unknown method 'topkk'"):
        recipes_from_entries([{"broadcast": {"by": "topkk"}}])
