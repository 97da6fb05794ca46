"""Robust blends as people run them: engines, attacks, combinations, and what is refused."""

import pytest
import torch

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list
from support import small_layout

TASK = {"data": "digits", "clients": 12, "split": {"dirichlet": 1.0}, "model": {"mlp": {"hidden": [16]}}}
QUICK = {"rounds": 3, "sample": 8, "seed": 5, "local": {"steps": 4, "lr": 0.2}, "evaluate": {"every": 3}}
BOUND = {"norm-bound": {"bound": 0.5}}
RECIPES = ["median", "trimmed-mean", "krum", {"krum": {"m": "most"}}, "geomed", BOUND]
ATTACKS = ["none", "label-flip", "sign-flip", "scaled", "nan"]


def play(method, kind="none", **options):
    fleet = {"attack": {"kind": kind, "share": 0.25}, **options.pop("fleet", {})}
    return sparing.run(TASK, method, fleet=fleet, **{**QUICK, **options})


def same_in_both_engines(method, kind, **options):
    plain = play(method, kind, engine="debug", plan={"path": "loop", "threads": 1}, **options)
    fast = play(method, kind, plan={"path": "loop", "chunk": 3, "threads": 1}, **options)
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    for one, other in zip(fast.table, plain.table, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-9, nan_ok=True)
    return fast


@pytest.mark.parametrize("kind", ATTACKS)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_both_engines_agree(recipe, kind):
    result = same_in_both_engines([recipe], kind, rounds=1)
    assert sum(result.metric("refused")) > 0 if kind == "nan" else sum(result.metric("refused")) == 0


PER_CLIENT = {"psfed": {"fraction": 0.4, "per_client": True}}
COMBINATIONS = [
    [PER_CLIENT, "median", "int8"],
    ["personal", PER_CLIENT, {"krum": {"m": "most"}}, "fedavgm"],
    ["personal", "geomed", "topk", "memory"],
    ["trimmed-mean", "sign", "memory"],
    ["psfed", BOUND, "stein"],
    [BOUND, "median", {"fedscr": {"adaptive": True, "threshold": 0.3, "dense": True}}],
    [{"fedhm": {"full": 0}}, "geomed", "int8"],
    ["pfedsim", "median"],
    ["local", "krum"],
    ["local", BOUND],
]


@pytest.mark.parametrize("kind", ["sign-flip", "nan"])
@pytest.mark.parametrize("method", COMBINATIONS, ids=str)
def test_combinations_agree_in_both_engines(method, kind):
    same_in_both_engines(method, kind, fleet={"dropout": 0.2}, rounds=2)


TOLD = {"trimmed-mean": {"share": 0.25}}
HOLDS = [(recipe, kind) for recipe in ("median", TOLD, "krum", "geomed") for kind in ("sign-flip", "scaled", "nan")]


@pytest.mark.parametrize(("recipe", "kind"), [*HOLDS, ({"norm-bound": {"bound": 1.0}}, "scaled")], ids=str)
def test_attackers_that_ruin_the_mean_do_not_ruin_these(recipe, kind):
    assert attacked(recipe, kind) > attacked(recipe, "none") - 0.1 > 0.7
    assert kind == "nan" or attacked("fedavg", kind) < 0.3


def attacked(recipe, kind):
    key = str(recipe), kind
    if key not in ACCURACY:
        local = {"steps": 10, "lr": 0.3, "momentum": 0.5}
        fleet = {"attack": {"kind": kind, "share": 0.25}}
        even, study = {**TASK, "split": "iid"}, {"rounds": 6, "sample": 12, "seed": 5, "evaluate": {"every": 6}}
        ACCURACY[key] = sparing.run(even, [recipe], local=local, fleet=fleet, **study).accuracy
    return ACCURACY[key]


ACCURACY: dict = {}


def test_what_is_refused_is_counted_by_client():
    result = play(["median"], "nan", sample=12)
    assert result.metric("refused") == [3.0, 3.0, 3.0]
    assert [r.clients for r in result.table] == [12, 12, 12]


@pytest.mark.parametrize("engine", ["vector", "debug"])
def test_a_round_in_which_all_is_refused_changes_nothing(engine, tmp_path):
    exact = {"path": "loop"}
    first = play(["median"], "nan", sample=12, rounds=1, plan=exact)
    path = tmp_path / "trace.csv"
    alone = next(i for i in range(12) if bool(attackers_of()[i]))
    rows = "".join(f"{i},1,1\n" for i in range(12)) + f"{alone},2,2\n"
    path.write_text("client,from,to\n" + rows)
    second = play(["median"], "nan", sample=12, rounds=2, engine=engine, plan=exact, fleet={"trace": str(path)})
    assert second.metric("refused") == [3.0, 1.0]
    assert second.model_sha256 == first.model_sha256


def attackers_of():
    from sparing.fleet.attack import choose_attackers

    return choose_attackers(QUICK["seed"], 12, 0.25, torch.zeros(0, dtype=torch.int64))


def test_without_attackers_a_wide_bound_and_an_untrimmed_mean_are_averaging():
    plain = play(["fedavg"], plan={"path": "loop"})
    assert play([{"norm-bound": {"bound": 1e6}}], plan={"path": "loop"}).model_sha256 == plain.model_sha256
    even = {**TASK, "split": "iid", "test": 0.0}
    runs = [sparing.run(even, method, **{**QUICK, "rounds": 1})
            for method in ("fedavg", [{"trimmed-mean": {"share": 0.0}}])]  # fmt: skip
    for name, x in runs[0].model.items():
        assert torch.allclose(x, runs[1].model[name], atol=2e-3)


def test_the_bound_reports_how_often_it_was_needed():
    result = play([{"norm-bound": {"bound": 1e-3}}])
    assert result.metric("bounded") == [1.0, 1.0, 1.0]
    assert min(result.metric("norm_median")) > 1e-3
    assert play([{"norm-bound": {"bound": 1e6}}]).metric("bounded") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("median+krum", "'krum' follows another robust blend, and arrivals are blended once"),
        ("geomed+stein", "needs a weighted mean"),
        ("trimmed-mean+ef21", "needs a weighted mean"),
        (["ef21", BOUND], "drop 'norm-bound'"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(method, words):
    with pytest.raises(MethodError, match=words):
        compose(small_layout(), *recipes_from_entries(method_list(method)))


def test_a_bound_must_be_given():
    with pytest.raises(ConfigError, match="'norm-bound' needs the option 'bound'"):
        recipes_from_entries(["norm-bound"])
    with pytest.raises(ConfigError, match=r"krum.m is 'all'"):
        recipes_from_entries([{"krum": {"m": "all"}}])
