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
ON_THREE = ("fedavg", "everything", "pfedsim published", "krum with psfed", "broadcast", "exact adapters", "secure")
"""Studies that three ranks play too."""
STUDIES = {name: STUDY | {"task": TASK, "method": method} | other for name, (method, other) in METHODS.items()}


def play_alone(folder: Path, studies: dict[str, dict[str, Any]]) -> dict[str, Any]:
    results = {}
    for name, study in studies.items():
        given = dict(study)
        key = bytes.fromhex(given.pop("secret")) if "secret" in given else None
        result = sparing.run(given.pop("task"), given.pop("method"), out=folder / name, secret=key, **given)
        results[name] = {"sha256": result.model_sha256, "metrics": [record.metrics for record in result.table]}
    return results


def rows_of(folder: Path, table: str) -> list[dict[str, str]]:
    """But for how long it took."""
    with open(folder / table, newline="") as file:
        return [{name: x for name, x in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("world", "names"), [(2, tuple(STUDIES)), (3, ON_THREE)], ids=["two", "three"])
def test_ranks_play_the_runs_of_one_process(world, names, tmp_path):
    """One test for all studies of so many ranks, who are started once for them."""
    studies = {name: STUDIES[name] for name in names}
    wanted, found = play_alone(tmp_path / "alone", studies), play_on_ranks(world, tmp_path / "ranks", studies)
    differ = {name: why for name in names if (why := difference(name, tmp_path, wanted, found))}
    assert not differ
    lines = [line for line in (tmp_path / "ranks/fedavg/log.txt").read_text().splitlines() if " clients=" in line]
    assert len(lines) == 3
    assert all("rank_seconds=" in line and "slowest=" in line for line in lines), "how long each rank took"


def difference(name: str, folder: Path, wanted: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What of this study's run is not that of one process."""
    one, several = folder / "alone" / name, folder / "ranks" / name
    tables = ("ledger.csv", "rounds.csv", "clients.csv")
    differ = [table for table in tables if rows_of(one, table) != rows_of(several, table)]
    if (one / "pictures.jsonl").read_text() != (several / "pictures.jsonl").read_text():
        differ.append("pictures.jsonl")
    if found[name]["sha256"] != wanted[name]["sha256"]:
        differ.append("model")
    for mine, theirs in zip(found[name]["metrics"], wanted[name]["metrics"], strict=True):
        if mine != pytest.approx(theirs, rel=1e-12, nan_ok=True):
            differ.append(f"metrics: {mine}, alone {theirs}")
    return differ
