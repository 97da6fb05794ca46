"""Adapters as people run them: engines, bytes, what never travels, ranks by capacity, and what is refused."""

import copy

import pytest
import torch
from torch import nn

import sparing
from sparing.core.compose import compose, remake_model
from sparing.core.errors import CheckpointError, ConfigError, DataError, MethodError
from sparing.core.tree import layout_of
from sparing.models.small import cnn
from sparing.parts.size.lora.adapted import Adapted, keyed_rows
from sparing.runs.explanation import explain_method
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list
from support import Stop, stop_after

QUICK = {"rounds": 2, "sample": 4, "seed": 5, "local": {"steps": 3, "batch": 16, "lr": 0.05, "momentum": 0.5}}
STILL = {"steps": 1, "batch": 16, "lr": 1e-30}
MLP = {"data": "digits", "clients": 8, "split": {"dirichlet": 0.3}, "model": "mlp"}
CNN = MLP | {"model": "cnn"}
LAYERS = {"mlp": ["dense1", "head"], "cnn": ["conv1", "conv2", "head"]}
PRODUCTS = ["svd", "partitioned", "increments"]
GATHERED = ["stack", *PRODUCTS]
EQUAL = ["average", "freeze-a", "exact", "padded", *GATHERED]
UNEQUAL = ["freeze-a", "padded", *GATHERED]


def adapters(task=MLP, **options):
    return {"lora": {"targets": LAYERS[task["model"]], "rank": 4, **options}}


def play(method, task=MLP, **options):
    return sparing.run(task, method, **{**QUICK, **options})


def declared(folder, ranks):
    path = folder / "devices.csv"
    path.write_text("client,adapter\n" + "".join(f"{i},{r}\n" for i, r in enumerate(ranks)))
    return {"capacity": str(path)}


def both_engines(method, task=MLP, **options):
    plain = play(method, task, engine="debug", plan={"path": "loop"}, **options)
    fast = play(method, task, plan={"path": "loop", "chunk": 2, "threads": 2}, **options)
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    return plain


@pytest.mark.parametrize("task", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("blend", EQUAL)
def test_both_engines_agree_at_equal_ranks(blend, task):
    both_engines([adapters(task, blend=blend)], task)


@pytest.mark.parametrize("task", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize("blend", UNEQUAL)
def test_both_engines_agree_at_unequal_ranks(blend, task):
    both_engines([adapters(task, blend=blend, ranks=[4, 1, 0, 2]), "topk", "int8"], task)


@pytest.mark.parametrize(
    "rest", ["psfed+topk+int8+memory", "fedadam", "personal", "stein", "ecsq+memory", "lowrank", "median", "broadcast"]
)
def test_over_average_everything_works_as_elsewhere(rest):
    both_engines([adapters(), *rest.split("+")])


@pytest.mark.parametrize("blend", GATHERED)
def test_layers_that_train_whole_are_averaged_beside_products(blend):
    method = [{"lora": {"targets": ["dense1"], "full": ["head"], "blend": blend, "rank": 2}}]
    found, plain = (
        both_engines(one, rounds=1)
        for one in (method, [{"lora": {"targets": ["dense1"], "full": ["head"], "rank": 2}}])
    )
    for name in ("head.weight", "head.bias"):
        assert torch.allclose(found.model[name], plain.model[name], atol=1e-6)
    with_personal = both_engines([*method, {"personal": {"layers": ["head"]}}, "int8"])
    assert with_personal.up_bytes < found.up_bytes


def test_masks_need_sums():
    for blend in ["exact", *GATHERED]:
        with pytest.raises(MethodError, match="needs the factors of each client"):
            play([adapters(blend=blend)], secure=True)
    with pytest.raises(MethodError, match="models of different sizes"):
        play([adapters(blend="freeze-a", ranks=[4, 1])], secure=True)


@pytest.mark.parametrize("rest", ["psfed+topk+int8+memory", "fedadam", "personal", "ecsq+memory"])
@pytest.mark.parametrize("blend", ["padded", "exact"])
def test_what_goes_on_in_coordinates_works_where_they_last(blend, rest):
    both_engines([adapters(blend=blend), *rest.split("+")])


@pytest.mark.parametrize(
    "rest",
    [
        ["ditto", "topk"],
        ["local"],
        ["pfedsim"],
        [{"norm-bound": {"bound": 0.5}}],
        [{"personal": {"layers": ["head"]}}],
        [{"psfed": {"fraction": 0}}],
        [{"psfed": {"fraction": 0.5, "start": 0.0, "warmup": 2}}],
    ],
    ids=str,
)
def test_exact_beside_what_keeps_weighs_or_bounds(rest):
    both_engines([adapters(blend="exact"), *rest], rounds=3)
    if rest[0] in ("ditto", "local"):
        both_engines([*rest, adapters(blend="exact")], rounds=3)


@pytest.mark.parametrize("blend", ["exact", "stack"])
def test_whoever_vanishes_misses_what_was_merged_meanwhile(blend):
    fleet = {"dropout": 0.3, "available": 0.7}
    who = {"who": ["global", "before", "after"], "every": 2}
    both_engines([adapters(blend=blend), "int8"], rounds=5, sample=3, fleet=fleet, evaluate=who)


def test_kept_momentum_goes_on_under_exact():
    both_engines([adapters(blend="exact")], local={**QUICK["local"], "velocity": "kept"}, rounds=3)


def test_what_is_merged_is_everyones_and_no_clients_own():
    for blend in ("exact", "stack"):
        result = both_engines([adapters(CNN, blend=blend), "int8"], CNN, rounds=3)
        for path in LAYERS["cnn"]:
            merged = result.model[f"{path}.merged.weight"]
            assert merged.shape == result.model[f"{path}.base.weight"].shape
            assert merged.dtype == torch.float32
            assert merged.abs().max() > 0
    alone = play([adapters(blend="stack")], rounds=1, sample=1)
    plain = play([adapters()], rounds=1, sample=1)
    assert alone.accuracy == pytest.approx(plain.accuracy, abs=1e-6), "one client alone is plain training"


def test_a_base_of_few_bits_keeps_what_is_merged_in_more():
    net = nn.Sequential(nn.Linear(6, 5).bfloat16())
    adapted = remake_model(net, recipes_from_entries([{"lora": {"targets": ["0"], "rank": 2, "blend": "exact"}}]))[0]
    assert adapted.merged.weight.dtype == torch.float32
    x, before = torch.randn(3, 6).bfloat16(), adapted(torch.ones(1, 6).bfloat16())
    adapted.merged.weight.data.fill_(1.0)
    assert adapted(x).dtype == torch.bfloat16
    assert torch.allclose(adapted(torch.ones(1, 6).bfloat16()).float(), before.float() + 6, atol=0.1)
    assert torch.allclose(adapted.weight, adapted.base.weight + 1)


@pytest.mark.parametrize("blend", ["exact", "stack"])
@pytest.mark.parametrize("engine", ["vector", "debug"])
def test_what_is_merged_is_resumed(engine, blend, tmp_path):
    """Some downloads after the break are residuals of rounds before it."""
    task, method = MLP | {"model": {"mlp": {"hidden": [96, 80]}}}, [adapters(blend=blend, rank=1), "int8"]
    options = {"rounds": 5, "sample": 2, "checkpoint": 1, "engine": engine, "plan": {"path": "loop"}}
    whole = play(method, task, out=tmp_path / "whole", **options)
    with pytest.raises(Stop):
        play(method, task, out=tmp_path / "broken", loggers=[stop_after(3)], **options)
    found = sparing.resume(tmp_path / "broken")
    assert found.model_sha256 == whole.model_sha256
    assert found.down_bytes == whole.down_bytes
    dense = 4 * sum(m * n for m, n in ((96, 64), (10, 80)))
    assert whole.down_bytes < 5 * 2 * dense / 2


@pytest.mark.accel
@pytest.mark.parametrize("blend", ["average", "exact", "stack"])
def test_stacked_clients_agree_within_rounding(blend):
    plain, fast = (play([adapters(blend=blend)], plan={"path": path}) for path in ("loop", "stacked"))
    assert fast.down_bytes == plain.down_bytes
    for name, x in plain.model.items():
        assert torch.allclose(fast.model[name], x, rtol=1e-3, atol=1e-4), name


def test_the_base_stays_and_never_travels():
    before = play("local", rounds=1, local=STILL).model
    result = play([adapters()])
    for path in LAYERS["mlp"]:
        assert torch.equal(result.model[f"{path}.base.weight"], before[f"{path}.weight"])
        assert result.model[f"{path}.lora_b.weight"].abs().max() > 0
    values = sum(4 * (m + n) for m, n in ((64, 64), (10, 64)))
    ledger = play([adapters()], rounds=1, sample=1)
    assert 4 * values < ledger.up_bytes < 4 * values + 120
    assert 4 * values < ledger.down_bytes < 4 * values + 120


def test_layers_named_in_full_train_whole_beside_adapters():
    result = play([{"lora": {"targets": ["dense1"], "full": ["head"]}}])
    assert {"head.weight", "head.bias", "dense1.lora_a.weight"} <= result.model.keys()
    first = play([{"lora": {"targets": ["dense1"], "full": ["head"]}}], local=STILL)
    assert not torch.equal(result.model["head.weight"], first.model["head.weight"])


@pytest.mark.parametrize("blend", ["average", "svd"])
def test_what_devices_declare_in_vain_is_told(tmp_path, blend):
    with pytest.warns(
        UserWarning, match="declares adapter, but lora offers one rank, which every client trains; offer"
    ):
        play([adapters(rank=2, blend=blend)], rounds=1, fleet=declared(tmp_path, [4, 3, 2, 1] * 2))


def test_capacity_chooses_the_rank(tmp_path):
    fleet = declared(tmp_path, [4, 1, 3, 0.5, 9, 2, 4, 1])
    result = play([adapters(blend="freeze-a", ranks=[4, 2, 1])], fleet=fleet, sample=8, rounds=1)
    columns = sum([4, 1, 2, 1, 4, 2, 4, 1])
    assert 4 * 74 * columns < result.up_bytes < 4 * 74 * columns + 8 * 120


def test_a_client_that_declares_nothing_is_named(tmp_path):
    fleet = declared(tmp_path, [4, 1, 3, 1, 9, 2, 4])
    with pytest.raises(DataError, match="says nothing of client 7; give one row for each of the 8 clients"):
        play([adapters(blend="stack", ranks=[4, 2, 1])], fleet=fleet)


def test_rank_zero_is_no_training(tmp_path):
    fleet = declared(tmp_path, [0, 0.5] * 4)
    method = [adapters(blend="freeze-a", ranks=[4, 0])]
    result = both_engines(method, fleet=fleet)
    first = play(method, local=STILL, fleet=fleet)
    assert result.model_sha256 == first.model_sha256


@pytest.mark.parametrize("layer", [nn.Linear(6, 5), nn.Conv1d(3, 5, 3, 2), nn.Conv2d(3, 5, 3, padding="same")], ids=str)
def test_an_adapter_is_the_weight_it_amounts_to(layer):
    x = torch.randn(4, 6) if isinstance(layer, nn.Linear) else torch.randn(4, 3, *[7] * (layer.weight.ndim - 2))
    net = remake_model(
        nn.Sequential(copy.deepcopy(layer)), recipes_from_entries([{"lora": {"targets": ["0"], "rank": 2}}])
    )
    adapted = net[0]
    assert isinstance(adapted, Adapted)
    assert torch.equal(net(x), layer(x))
    nn.init.normal_(adapted.lora_b.weight)
    layer.weight.data = adapted.weight.detach()
    assert torch.allclose(net(x), layer(x), atol=1e-4)


def test_rows_of_a_are_the_same_at_any_rank():
    long = keyed_rows("q", 3, 0, 7, (5,))
    assert torch.equal(keyed_rows("q", 3, 0, 4, (5,)), long[:4])
    assert not torch.equal(keyed_rows("v", 3, 0, 7, (5,)), long)
    assert not torch.equal(keyed_rows("q", 3, 1, 7, (5,)), long)
    assert float(long.abs().max()) <= 5**-0.5


def test_attention_reads_the_adapted_weight():
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8)
    before = attention(x, x, x)[0]
    net = remake_model(nn.Sequential(attention), recipes_from_entries([{"lora": {"targets": ["out_proj"], "rank": 2}}]))
    assert torch.allclose(net[0](x, x, x)[0], before, atol=1e-5)
    nn.init.normal_(net[0].out_proj.lora_b.weight)
    assert not torch.allclose(net[0](x, x, x)[0], before, atol=1e-2)


def composed(spec, net=None):
    made = recipes_from_entries(method_list(spec))
    return compose(layout_of(remake_model(net or cnn(1, 10, 8), made)), *made)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "'q_proj' matches no dense layer or convolution"),
        ({"targets": ["haed"]}, "did you mean 'head'"),
        ({"targets": []}, "lora.targets is empty"),
        ({"targets": ["head"], "full": ["dnse"]}, "lora.full: 'dnse' matches no layer"),
        ({"targets": ["dense", "head"], "full": ["head"]}, "'head' is of lora.full and of lora.targets"),
        ({"targets": ["head"], "rank": 11}, "rank 11 is above that of 'head', which is 10"),
        ({"targets": ["head"], "rank": 0}, "no rank above 0"),
        ({"targets": ["head"], "ranks": [2, 2]}, "each rank once"),
        ({"targets": ["head"], "ranks": [2, 1], "blend": "average"}, "needs equal ranks"),
        ({"targets": ["head"], "ranks": [2, 1], "blend": "exact"}, "needs equal ranks"),
        ({"targets": ["head"], "blend": "stack", "keep": "all"}, "lora.keep is 'all', but"),
        ({"targets": ["head"], "keep": "all"}, "lora.keep is 'all', but"),
    ],
    ids=str,
)
def test_options_that_cannot_be_meant(options, said):
    with pytest.raises(MethodError, match=said):
        composed([{"lora": options}])


def test_numbers_out_of_range():
    for options in ({"rank": -1}, {"alpha": 0}, {"ranks": [4, -2]}):
        with pytest.raises(ConfigError, match="lora"):
            composed([{"lora": {"targets": ["head"], **options}}])


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ([{"split-mix": {"ratio": 0.5}}, adapters(CNN)], "remade already"),
        (["heterofl", adapters(CNN)], "cannot resize"),
        ([adapters(CNN), {"fedhm": {"full": 0}}], "keep one of them"),
        ([adapters(CNN, blend="freeze-a", ranks=[4, 1]), "topk", "memory"], "cannot keep"),
        ([adapters(CNN, blend="freeze-a", ranks=[4, 1]), "psfed"], "cannot keep"),
        ([adapters(CNN, blend="svd"), "topk", "memory"], "another basis"),
        ([adapters(CNN, blend="svd"), "psfed"], "another basis"),
        (["psfed", adapters(CNN, blend="increments")], "another basis"),
        ([adapters(CNN, blend="partitioned"), {"personal": {"layers": ["conv1"]}}], "another basis"),
        ([adapters(CNN, blend="svd"), "ditto"], "another basis"),
        ([adapters(CNN, blend="increments"), "stein"], "set lora.blend to average or freeze-a"),
        ([adapters(CNN, blend="svd"), "fedadam"], "set lora.blend to average or freeze-a"),
        ([adapters(CNN, blend="svd"), "fedsim"], "set lora.blend to average or freeze-a"),
        ([adapters(CNN, blend="svd"), "scaffold"], "set lora.blend to average or freeze-a"),
        ([adapters(CNN, blend="svd"), "ef21"], "another basis"),
        ([adapters(CNN, blend="svd"), {"norm-bound": {"bound": 1.0}}], "set lora.blend to average or freeze-a"),
        ([adapters(CNN, blend="svd"), "broadcast"], "set lora.blend to average or freeze-a"),
        ([adapters(CNN, blend="stack"), "topk", "memory"], "another basis"),
        ([adapters(CNN, blend="stack"), "psfed"], "another basis"),
        ([adapters(CNN, blend="stack"), "fedscr"], "another basis"),
        ([adapters(CNN, blend="stack"), "ef21"], "works on updates"),
        ([adapters(CNN, blend="stack"), "fedadam"], "set lora.blend to exact, average or freeze-a"),
        ([adapters(CNN, blend="stack"), "stein"], "set lora.blend to exact, average or freeze-a"),
        ([adapters(CNN, blend="stack"), "broadcast"], "broadcast already"),
        (["broadcast", adapters(CNN, blend="exact")], "broadcast already"),
        ([adapters(CNN, blend="exact"), "stc"], "set stc.down: false"),
        ([adapters(CNN, blend="exact"), "stein"], "'stein' makes another mean"),
        ([adapters(CNN, blend="exact"), "scaffold"], "'scaffold' makes another mean"),
        ([adapters(CNN, blend="exact"), "ef21"], "drop 'lora.blend: exact'"),
        ([adapters(CNN, blend="exact"), "dp"], "dp"),
        ([adapters(CNN, blend="exact"), "median"], "collecting blend"),
        ([adapters(CNN, blend="exact"), {"psfed": {"fraction": 0, "sync": 3}}], "rounds of psfed.fraction 0"),
        ([adapters(CNN, blend="padded"), "stein"], "weighs clients in every layer by itself, but 'stein'"),
        ([adapters(CNN, blend="padded"), "fedsim"], "weighs clients in every layer by itself"),
        ([adapters(CNN, blend="padded"), "median"], "collecting blend"),
        ([adapters(CNN, blend="padded", ranks=[4, 1]), "topk", "memory"], "cannot keep"),
        ([adapters(CNN, blend="svd"), "median"], "arrivals are blended once"),
        ([adapters(CNN, blend="svd"), "dp"], "dp"),
    ],
    ids=str,
)
def test_what_does_not_go_together(method, said):
    with pytest.raises(MethodError, match=said):
        composed(method)


def test_a_base_that_is_not_frozen_is_refused():
    recipe = recipes_from_entries([adapters(CNN)])[0]
    with pytest.raises(MethodError, match="call `remade` first"):
        compose(layout_of(cnn(1, 10, 8)), recipe)
    net = remake_model(cnn(1, 10, 8), [recipe])
    net.requires_grad_(True)
    with pytest.raises(MethodError, match="is not frozen"):
        compose(layout_of(net), recipe)


def test_convolutions_in_groups_are_refused():
    with pytest.raises(MethodError, match="a convolution in groups"):
        composed([{"lora": {"targets": ["0"]}}], nn.Sequential(nn.Conv2d(8, 8, 3, groups=8)))


def test_layers_of_an_older_peft_are_refused():
    layer = nn.Linear(4, 4)
    layer.lora_A = nn.ModuleDict({"default": nn.Linear(4, 2)})
    with pytest.raises(MethodError, match=r"of another kind \(of an older version\); unload it"):
        composed([{"lora": {"rank": 1}}], nn.Sequential(layer))


def test_explain_says_what_trains_and_what_is_frozen():
    found = explain_method([adapters(CNN, ranks=[4, 1])], "cnn", (1, 8, 8), 10)
    plain = explain_method("fedavg", "cnn", (1, 8, 8), 10)
    assert found.frozen == plain.parameters
    assert plain.frozen == 0
    assert [size.name for size in found.sizes] == ["rank 4", "rank 1"]
    assert [size.up.sent for size in found.sizes] == [found.parameters, found.parameters // 4]


def test_another_base_under_the_same_adapters_is_another_run(tmp_path):
    def task(shift):
        def build():
            net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
            net[2].weight.data += shift
            return net

        samples = [(torch.ones(8, 3), torch.zeros(8).long())] * 4
        return sparing.Task(build, train=samples, test=samples[0])

    method = [{"lora": {"targets": ["0"], "rank": 2}}]
    options = {"rounds": 2, "sample": 2, "local": {"steps": 1}}
    with pytest.raises(Stop):
        sparing.run(task(0.0), method, out=tmp_path / "a", loggers=[stop_after(1)], **options)
    with pytest.raises(CheckpointError, match="the initial model changed"):
        sparing.resume(tmp_path / "a", task=task(1e-6))
    sparing.resume(tmp_path / "a", task=task(0.0))


def test_broken_off_and_resumed_is_the_same_run(tmp_path):
    method = [adapters(ranks=[4, 2], keep="all"), "int8"]
    whole = play(method, rounds=3, checkpoint=1, out=tmp_path / "whole")
    with pytest.raises(Stop):
        play(method, rounds=3, checkpoint=1, out=tmp_path / "broken", loggers=[stop_after(2)])
    assert sparing.resume(tmp_path / "broken").model_sha256 == whole.model_sha256
