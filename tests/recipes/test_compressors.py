"""Compressors in real runs: both engines, the same model and the same bytes; and what they cost."""

import pytest
import torch

import sparing
from sparing.core.compose import compose
from sparing.core.errors import MethodError
from sparing.core.parcel import Leaf, Parcel
from sparing.core.registry import find_recipe
from sparing.core.tree import Layout
from sparing.runs.explanation import explain_method
from support import make_ctx, view_of

METHODS = [
    "int4",
    "qsgd",
    [{"qsgd": {"levels": 7, "bucket": 64}}],
    "sign",
    "ternary",
    "stc",
    "drop",
    "eden",
    [{"eden": {"bits": 3}}],
    "powersgd",
    "ef21",
    "dgc",
    "prune",
    "psfed+qsgd",
    [{"psfed": {"per_client": True, "fraction": 0.3}}, "eden"],
    [{"psfed": {"selector": "magnitude"}}, "stc"],
    ["psfed", {"dgc": {"warmup": 2, "clip": 1.0}}, "fp16"],
    "personal+powersgd",
    "topk+sign+memory",
    "personal+sign+ef21+fedavgm",
    "prune+eden+memory",
    "personal+prune+topk+int4+memory",
    "fedscr+int4+stein",
    [{"drop": {"over": "model", "ratio": 0.05}}],
    "ecsq",
    "lowrank",
    "topk+ecsq+memory",
    "personal+lowrank+fedavgm",
    [{"psfed": {"per_client": True, "fraction": 0.3}}, {"ecsq": {"over": "layer", "memory": True}}],
    [{"lowrank": {"energy": 1.0, "rank": 8}}],
    [{"lowrank": {"memory": False}}, "ef21"],
]


def name(method):
    return method if isinstance(method, str) else "+".join(p if isinstance(p, str) else next(iter(p)) for p in method)


@pytest.mark.parametrize("method", METHODS, ids=name)
def test_both_engines_agree(method):
    study = {"rounds": 3, "sample": 4, "seed": 2, "local": {"steps": 2}, "fleet": {"dropout": 0.2}}
    fast, plain = (
        sparing.run("digits", method, engine=engine, plan={"path": "loop", "chunk": 3}, evaluate={"every": 3}, **study)
        for engine in ("vector", "debug")
    )
    assert fast.model_sha256 == plain.model_sha256
    assert [(r.up_bytes, r.down_bytes, r.clients) for r in fast.table] == [
        (r.up_bytes, r.down_bytes, r.clients) for r in plain.table
    ]
    assert fast.personal_accuracy == plain.personal_accuracy


@pytest.mark.parametrize(
    ("method", "bits"),
    [("int4", 4), ("qsgd", 8), ("ternary", 2), ("sign", 1), ("stc", 0.1), ("drop", 0.4), ("dgc", 0.4), ("prune", 16)],
)
def test_an_upload_takes_so_many_bits_a_parameter(method, bits):
    study = {"rounds": 2, "sample": 4, "seed": 2, "local": {"steps": 2}, "evaluate": {"every": 2}}
    result = sparing.run("digits", method, **study)
    parameters = sum(x.numel() for x in result.model.values())
    frame = 40 + 16 * len(result.model)  # header, lengths and scales
    assert bits * 0.8 * parameters / 8 < result.up_bytes / 8 < bits * 1.05 * parameters / 8 + frame


@pytest.mark.parametrize(
    "method",
    [
        "int4",
        "qsgd",
        "sign+memory",
        "stc",
        "eden",
        "powersgd",
        "ef21",
        "dgc",
        "drop",
        "prune",
        "ecsq",
        "lowrank",
        [{"budget": "2kB"}],
    ],
)
def test_explain_knows_what_it_costs(method):
    told = explain_method(method, "cnn", (1, 8, 8), 10)
    assert told.sizes[0].up.bytes < told.sizes[0].down.bytes * 1.04  # every value, and a bit for each


def compressed(method, x):
    layout = Layout({"w": (x.shape[1],)}, {"w": torch.float32})
    codec, ctx = compose(layout, find_recipe(method).make(ratio=0.1)).up[0], make_ctx([0])
    out, _ = codec.encode(Parcel({"w": Leaf(x)}, {}), codec.init(layout), view_of(ctx))
    return codec.decode(out, ctx).leaves["w"].value.double()


@pytest.mark.parametrize("d", [1, 2, 7, 100, 999])
def test_stc_and_drop_contract_as_the_page_says(d):
    for seed in range(5):
        x = torch.randn(1, d, generator=torch.Generator().manual_seed(seed)) ** 3
        size = float(x.double().square().sum())
        k = -(-d // 10)
        kept = x.double().abs().sort(descending=True).values[:, :k]
        error = float((compressed("stc", x) - x).square().sum())
        assert error == pytest.approx(size - float(kept.sum()) ** 2 / k, rel=1e-5, abs=1e-6 * size)
        assert float((compressed("drop", x) - x).square().sum()) <= (1 - 0.1 + 1 / d) * size


@pytest.mark.parametrize("name", ["powersgd", "lowrank"])
def test_factors_of_a_part_are_refused_before_anything_is_written(name, tmp_path):
    with pytest.raises(MethodError, match=f"'{name}' factors whole matrices, but only a part of them is shared"):
        sparing.run("digits", ["psfed", name], rounds=1, sample=2, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
