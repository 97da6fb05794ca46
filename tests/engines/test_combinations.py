"""Combinations of three and more: both engines, the same model and the same bytes."""

import pytest

import sparing
from sparing.core.errors import MethodError, SparingError

PUBLISHED = {"pfedsim": {"mode": "published", "warmup": 0.4}}
STEIN = {"stein": {"warmup": 1}}
HM = {"fedhm": {"ratios": [1, 0.5, 0.25]}}
COMBINATIONS = [
    ["psfed", "pfedsim", "int8"],
    ["psfed", "pfedsim", "fedscr", "int8", STEIN],
    [{"psfed": {"selector": "magnitude"}}, "topk", "fp16", "memory"],
    [{"psfed": {"selector": "gradient", "per_client": False}}, "personal", "int8"],
    [{"psfed": {"per_client": True, "fraction": 0.3}}, "fedsim", "fedavgm"],
    [{"psfed": {"fraction": 0.3}}, "fedsim", STEIN],
    [{"psfed": {"selector": "layers", "sync": 2}}, "fedscr", "bf16"],
    [HM, "topk", STEIN],
    ["personal", HM, "int8", "fedavgm"],
    [PUBLISHED, "topk", "int8"],
    [PUBLISHED, {"fedscr": {"adaptive": True}}, STEIN],
    [{"pfedsim": {"at": "client"}}, "randk", "int8"],
    ["pfedsim", {"fedscr": {"adaptive": True, "threshold_mode": "relative"}}, "int8", STEIN],
    ["fedsim", {"topk": {"over": "model", "memory": True}}, "fedavgm"],
    [{"sr-fedavg": {"topk": 0.2, "warmup": 1}}, "psfed", "memory"],
    ["local", "topk", "int8"],
    ["fedsim", {"lowrank": {"energy": 0.8}}, "fedavgm"],
    ["psfed", "pfedsim", "topk", {"ecsq": {"step": 0.5}}, "memory"],
    ["split-mix", "topk", "int8"],
    ["personal", {"split-mix": {"ratio": 0.25}}, "randk", "fedavgm"],
]


def name(method):
    return "+".join(part if isinstance(part, str) else next(iter(part)) for part in method)


@pytest.mark.parametrize("method", COMBINATIONS, ids=name)
def test_both_engines_agree(method):
    study = {"rounds": 5, "sample": 5, "seed": 2, "local": {"steps": 2}, "fleet": {"dropout": 0.2}}
    runs = [
        sparing.run("digits", method, engine=engine, plan={"path": "loop", "chunk": 3}, evaluate={"every": 5}, **study)
        for engine in ("vector", "debug")
    ]
    fast, plain = runs
    assert fast.model_sha256 == plain.model_sha256
    assert [(r.up_bytes, r.down_bytes, r.clients) for r in fast.table] == [
        (r.up_bytes, r.down_bytes, r.clients) for r in plain.table
    ]
    assert fast.personal_accuracy == plain.personal_accuracy
    for one, other in zip(fast.table, plain.table, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-9, nan_ok=True)


REFUSED = {
    "keeps whole models": ["psfed", PUBLISHED],
    "warms up with FedAvg": [PUBLISHED, "fedsim"],
    "keeps it at home": ["personal", PUBLISHED],
    "weights by everyone's samples": ["fedsim", {"fedscr": {"aggregation": "unbiased"}}],
    "adds up what clients send": ["topk", "ef21", STEIN],
    "shrunk twice": ["sr-fedavg", STEIN],
    "both say how much": ["fedhm", "fedsim"],
    "twice": ["psfed", "topk", "psfed"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_compute_nonsense_is_refused(words):
    with pytest.raises(SparingError, match=words):
        sparing.run("digits", REFUSED[words], rounds=1, sample=2)


@pytest.mark.parametrize("method", [["psfed", HM], [HM, "topk", "memory"], [HM, "fedscr"]], ids=name)
def test_what_cannot_be_is_refused(method):
    with pytest.raises(MethodError, match=r"a client cannot keep|serves every client"):
        sparing.run("digits", method, rounds=1, sample=2)
