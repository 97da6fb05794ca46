"""The law: a run has the same bits on any number of ranks: model, ledger, tables, metrics."""

import csv
from pathlib import Path
from typing import Any

import pytest

import sparing
from ranks.players import play_on_ranks

TASK = {"data": "digits", "clients": 9, "split": {"dirichlet": 0.5}, "model": {"mlp": {"hidden": [12]}}}
CNN = TASK | {"model": "cnn"}
STUDY: dict[str, Any] = {
    "rounds": 3,
    "sample": 5,
    "seed": 1,
    "local": {"steps": 2, "lr": 0.05},
    "evaluate": {"every": 2, "clients": 7},
    "checkpoint": 2,
    "plan": {"path": "loop", "chunk": 2},
}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "everything": ("psfed+topk+int8+memory", {"evaluate": {"every": 2, "clients": 7, "who": ["global", "before"]}}),
    "masks of their own": ([{"psfed": {"per_client": True}}, "int8"], {"plan": {"path": "loop", "bank": "file"}}),
    "personal": (["personal", "ecsq", "memory"], {"fleet": {"dropout": 0.2, "available": 0.8}}),
    "pfedsim published": ([{"pfedsim": {"mode": "published", "warmup": 0.4}}], {}),
    "pfedsim in files": (
        [{"pfedsim": {"mode": "published", "warmup": 0.4}}],
        {"plan": {"path": "loop", "bank": "file"}},
    ),
    "fedsim": ("fedsim", {}),
    "stein": ([{"stein": {"warmup": 1, "target": "uniform"}}, "topk"], {}),
    "median": ("median", {}),
    "krum with psfed": (["psfed", "krum"], {}),
    "trimmed over masks of their own": ([{"psfed": {"per_client": True}}, "trimmed-mean"], {}),
    "geometric median": ("geomed", {}),
    "scaffold": ("scaffold", {}),
    "ditto": (["ditto"], {"evaluate": {"every": 3, "clients": 7, "who": ["before", "after"]}}),
    "broadcast": ([{"topk": {"ratio": 0.2}}, "memory", {"broadcast": {"by": "ecsq"}}], {}),
    "fedhm": ("fedhm", {"task": CNN}),
    "adapters": ([{"lora": {"targets": ["conv2", "head"], "ranks": [4, 1], "keep": "all"}}, "topk"], {"task": CNN}),
    "exact adapters": ([{"lora": {"targets": ["head"], "rank": 1, "blend": "exact"}}, "psfed"], {}),
    "stacked adapters": ([{"lora": {"targets": ["head"], "ranks": [2, 1], "blend": "stack"}}, "int8"], {}),
    "fedscr": (["fedscr"], {"task": CNN, "record": ["updates", "similarity"]}),
    "noise of clients": ([{"dp": {"mode": "local", "noise": 0.1}}], {"secret": bytes(range(32)).hex()}),
    "noise of the server": ([{"dp": {"noise": 0.5}}], {"secret": bytes(range(32)).hex()}),
    "secure": ([{"int8": {"common": True}}, "memory"], {"secure": True, "fleet": {"dropout": 0.1}}),
    "norm-bound": ([{"norm-bound": {"bound": 0.5}}], {"fleet": {"attack": {"kind": "sign-flip", "share": 0.3}}}),
    "one client for some": ("fedavg", {"sample": 3}),
}
STUDIES = {name: STUDY | {"task": TASK, "method": method} | other for name, (method, other) in METHODS.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    results = {}
    for name, study in STUDIES.items():
        given = dict(study)
        key = bytes.fromhex(given.pop("secret")) if "secret" in given else None
        result = sparing.run(given.pop("task"), given.pop("method"), out=folder / name, secret=key, **given)
        results[name] = {"sha256": result.model_sha256, "metrics": [record.metrics for record in result.table]}
    return {"folder": folder, "results": results}


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    return {"folder": folder, "results": play_on_ranks(request.param, folder, STUDIES)}


def rows_of(folder: Path, table: str) -> list[dict[str, str]]:
    """But for how long it took."""
    with open(folder / table, newline="") as file:
        return [{name: x for name, x in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STUDIES)
def test_ranks_play_the_run_of_one_process(name, alone, ranks):
    one, several = alone["folder"] / name, ranks["folder"] / name
    for table in ("ledger.csv", "rounds.csv", "clients.csv"):
        assert rows_of(one, table) == rows_of(several, table), table
    assert (one / "pictures.jsonl").read_text() == (several / "pictures.jsonl").read_text()
    assert ranks["results"][name]["sha256"] == alone["results"][name]["sha256"]
    for mine, theirs in zip(ranks["results"][name]["metrics"], alone["results"][name]["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12, nan_ok=True)


def test_the_log_shows_how_long_each_rank_took(ranks):
    lines = [line for line in (ranks["folder"] / "fedavg" / "log.txt").read_text().splitlines() if " clients=" in line]
    assert len(lines) == 3
    assert all("rank_seconds=" in line and "slowest=" in line for line in lines)
