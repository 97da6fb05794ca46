"""No upload or download is larger than `explain` says: runs of every recipe, and of what people combine."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparing
from sparing.core.parcel import Leaf, Limit, Parcel, Schema, Spec
from sparing.core.registry import known_recipes
from sparing.runs.explanation import DirectionCost, explain_method
from sparing.wire import nbytes, schema_of
from sparing.wire.bound import most_bytes, most_values

NEEDS = {
    "budget": [{"budget": "9kB"}],
    "lora": [{"lora": {"targets": ["conv2", "head"]}}],
    "memory": ["topk", "memory"],
    "tight": ["int8", "tight"],
    "norm-bound": [{"norm-bound": {"bound": 1.0}}],
    "obfuscate": [{"obfuscate": {"noise": 0.1}}],
}
"""Recipes that mean nothing alone, or not without an option."""
COMBINED = {
    "full syncs": [{"psfed": {"sync": 2}}, "topk", "int8", "memory"],
    "a warm-up": [{"psfed": {"per_client": True, "start": 0.1, "warmup": 2}}, {"topk": {"over": "model"}}, "qsgd"],
    "told masks": [{"psfed": {"selector": "magnitude"}}, "sign"],
    "masks of any size": [{"psfed": {"selector": {"union": ["random", "magnitude"]}}}, {"topk": {"mode": "quantile"}}],
    "layers in turn": [{"psfed": {"selector": "layers"}}, "int4"],
    "personal layers": ["psfed", "personal", "topk", "memory"],
    "a budget of what is personal": ["personal", {"budget": 3000}, "tight"],
    "a budget of a part": [{"psfed": {"fraction": 0.3}}, {"budget": 2000}],
    "a budget that fits hardly anything": [{"budget": 120}],
    "a budget beside values": ["pfedsim", {"budget": 4000}],
    "rotated parts": ["psfed", "eden"],
    "several sparsifiers": ["randk", "topk", "sign"],
    "codes of what is largest": ["topk", "ecsq"],
    "pruned": ["prune", "topk", "int8"],
    "other sizes": ["heterofl", "topk", "int8"],
    "both ways": [{"broadcast": {"by": "topk+int8"}}, "lowrank"],
    "structures": ["fedscr", "int8", "tight"],
    "control variates": ["scaffold", "topk", "memory"],
}  # fmt: skip
STUDY = {"rounds": 3, "sample": 3, "engine": "debug", "local": {"steps": 2}, "evaluate": {"every": 3, "clients": 2}}


def largest_of_a_run(method, folder) -> dict[str, int]:
    task = {"data": "digits", "clients": 6, "model": "cnn"}
    sparing.run(task, method, plan={"parcels": "kept"}, out=folder, **STUDY)
    sizes: dict[str, int] = {}
    for file in (folder / "parcels").rglob("*.spar"):
        way = file.stem.rpartition("-")[2]
        sizes[way] = max(sizes.get(way, 0), file.stat().st_size)
    return sizes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*sorted(known_recipes()), *COMBINED])
def test_no_round_takes_more_than_explained(name, tmp_path):
    method = COMBINED.get(name) or NEEDS.get(name, [name])
    sizes = explain_method(method, "cnn", (1, 8, 8), 10).sizes
    took = largest_of_a_run(method, tmp_path / "run")
    for way in ("down", "up"):
        said: list[DirectionCost] = [getattr(size, way) for size in sizes]
        assert took.get(way, 0) <= max(one.most for one in said), way
        assert all(one.about <= one.bytes <= one.most for one in said)


@pytest.mark.parametrize(("room", "most"), [("20kB", 20_000), (3000, 3000), (120, 120)])
def test_a_budget_is_explained_as_what_it_is(room, most):
    up = explain_method([{"budget": room}], "cnn", (1, 8, 8), 10).sizes[0].up
    assert up.bytes == up.most == most
    assert 0.5 * most < up.about <= most
    assert up.parameters == up.sent, "a component is no parameter"


def test_a_quantile_promises_nothing():
    """All that is equal to it is sent."""
    drop = explain_method("drop", "cnn", (1, 8, 8), 10).sizes[0].up
    topk = explain_method("dgc", "cnn", (1, 8, 8), 10).sizes[0].up
    assert drop.about == topk.about
    assert drop.sent == drop.parameters
    assert topk.sent < topk.parameters / 50


def leaf_strategy(draw, limited: bool) -> Leaf:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    coin = lambda *sides: torch.rand(1, *sides, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) < 0.3  # noqa: E731
    scope = coin(*shape) if limited or draw(st.booleans()) else None
    keep = (coin(*shape),) if draw(st.booleans()) else (coin(shape[0], *[1] * (len(shape) - 1)),)
    keep = keep if draw(st.booleans()) else ()
    mask = torch.ones(1, *shape, dtype=torch.bool)
    for one in (scope, *keep):
        mask = mask if one is None else mask & one
    codes, tight = draw(st.booleans()), draw(st.booleans())
    bits = draw(st.integers(1, 8)) if codes else 32
    top = max(1, 2 ** (bits - 1) - 1) if codes else 1
    value = torch.randint(1, top + 1, (1, *shape)).to(torch.int8) if codes else torch.randn(1, *shape)
    tight = tight and (codes or bool(keep))
    return Leaf(torch.where(mask, value, 0), scope, keep, torch.ones(1, 2) if codes else None, bits, tight=tight)


@given(st.data())
def test_no_parcel_is_larger_than_its_schema_allows(data):
    limited = data.draw(st.booleans())
    leaves = {str(i): leaf_strategy(data.draw, limited) for i in range(data.draw(st.integers(1, 4)))}
    parcel = Parcel(leaves, {"n": torch.ones(1)})
    schema = schema_of(parcel, "")
    specs = {name: spec._replace(bits=min(8, int(leaves[name].bits))) for name, spec in schema.leaves.items()}
    counts = [int((leaf.value != 0).sum()) for leaf in leaves.values()]
    if limited:
        shared = sum(int(leaf.scope.sum()) for leaf in leaves.values() if leaf.scope is not None)
        whole = {n: s._replace(scope=torch.ones(1, *s.shape, dtype=torch.bool)) for n, s in specs.items()}
        schema = schema._replace(leaves=whole, limit=Limit(frozenset(leaves), shared, sum(counts)))
    else:
        schema = schema._replace(
            leaves={n: s._replace(most=k) for (n, s), k in zip(specs.items(), counts, strict=True)}
        )
    assert int(nbytes(parcel)[0]) <= most_bytes(schema)
    assert sum(counts) <= most_values(schema)


def test_bytes_that_codecs_keep_to_bound_a_parcel_unless_an_empty_one_takes_more():
    spec = Spec((1000,), torch.int8, tight=True)
    assert most_bytes(Schema({"w": spec}, {}, most=500.0)) == 500
    assert most_bytes(Schema({"w": spec}, {}, most=1.0)) < 40
    assert most_bytes(Schema({"w": spec}, {}, most=math.inf)) > 1000
