"""Trained adapters as files: what they hold is what the run has learned, and what cannot be written is refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import sparing
from sparing.cli.app import app
from sparing.core.compose import remake_model
from sparing.core.errors import CheckpointError, ConfigError, MethodError
from sparing.parts.size.lora.adapted import Adapted
from sparing.parts.size.lora.peft_form import adapted_layers, merged_tensors, peft_form
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import study_of_arguments, task_from_study
from support import Stop, stop_after

QUICK = {"rounds": 2, "sample": 4, "seed": 5, "local": {"steps": 3, "batch": 16, "lr": 0.05}}
TASKS = {name: {"data": "digits", "clients": 8, "model": name} for name in ("mlp", "cnn")}
LAYERS = {"mlp": ["dense1", "head"], "cnn": ["conv1", "conv2", "head"]}
BASE = "base_model.model."


def adapters(model="mlp", **options):
    return [{"lora": {"targets": LAYERS[model], "rank": 4, **options}}]


def play(folder, model="mlp", *, method=None, **options):
    return sparing.run(TASKS[model], method or adapters(model, **options), out=folder, **QUICK)


def network(model, method=None, result=None):
    """The task's network, before training or with what a run has learned in it."""
    study = study_of_arguments(TASKS[model], "fedavg", QUICK)
    net = task_from_study(study).build(QUICK["seed"])
    if method is None:
        return net.eval()
    net = remake_model(net, recipes_from_entries(method), seed=QUICK["seed"])
    net.load_state_dict(result.model)
    return net.eval()


def read(folder):
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


def scale_of(config, path):
    rank, alpha = (
        next((x for key, x in config[pattern].items() if re.match(rf"(.*\.)?({key})$", path)), config[usual])
        for pattern, usual in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    return rank, alpha / (rank**0.5 if config["use_rslora"] else rank)


def loaded_by_hand(net, folder):
    """base + (alpha / r) B A, and the layers that were saved whole."""
    tensors, config = read(folder)
    state = net.state_dict()
    paths = {name.removeprefix(BASE).rpartition(".lora_")[0] for name in tensors if ".lora_" in name}
    for path in paths:
        a, b = (tensors.pop(f"{BASE}{path}.lora_{side}.weight").flatten(1) for side in "AB")
        rank, scale = scale_of(config, path)
        assert rank == len(a) == b.shape[1]
        state[f"{path}.weight"] += (scale * b @ a).reshape(state[f"{path}.weight"].shape)
    assert {name.removeprefix(BASE).rpartition(".")[0] for name in tensors} == set(config["modules_to_save"] or [])
    return state | {name.removeprefix(BASE): x for name, x in tensors.items()}


def same_logits(one, other):
    x = torch.randn(16, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("mlp", {}),
        ("cnn", {"scale": "root"}),
        ("cnn", {"ranks": [3, 1]}),
        ("mlp", {"ranks": [4, 2], "keep": "all", "scale": "rank"}),
        ("mlp", {"ranks": [4, 2], "blend": "padded", "scale": "root"}),
        ("mlp", {"targets": ["dense1"], "full": ["head"], "blend": "freeze-a"}),
    ],
    ids=str,
)
def test_files_hold_what_the_run_has_learned(tmp_path, model, options):
    method, run = adapters(model, **options), tmp_path / "run"
    result = play(run, model, **options)
    paths = sparing.export(run, peft=tmp_path / "adapter", merged=tmp_path / "merged")
    assert [path.name for path in paths] == ["adapter_model.safetensors", "adapter_config.json", "model.safetensors"]
    trained = network(model, method, result)
    by_hand, merged = network(model), network(model)
    by_hand.load_state_dict(loaded_by_hand(by_hand, tmp_path / "adapter"))
    merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    same_logits(by_hand, trained)
    same_logits(merged, trained)
    with pytest.raises(AssertionError):
        same_logits(network(model), trained)


@pytest.mark.parametrize("options", [{}, {"scale": "rank"}, {"blend": "padded"}, {"blend": "freeze-a"}], ids=str)
def test_a_client_of_lower_rank_gets_the_leading_part(tmp_path, options):
    options = {"ranks": [4, 2], "scale": "shared", **options}
    play(tmp_path / "run", **options)
    for rank in (None, 4, 2):
        sparing.export(tmp_path / "run", peft=tmp_path / f"{rank}", rank=rank)
    whole, same, part = (read(tmp_path / name) for name in ("None", "4", "2"))
    assert part[1]["r"] == 2
    assert part[1]["lora_alpha"] == (16 if options["scale"] == "rank" else 8)
    for path in LAYERS["mlp"]:
        products = []
        for (tensors, config), leading in ((whole, 4), (same, 4), (whole, 2), (part, 2)):
            a, b = (tensors[f"{BASE}{path}.lora_{side}.weight"] for side in "AB")
            products.append(scale_of(config, path)[1] * b[:, :leading] @ a[:leading])
        torch.testing.assert_close(products[0], products[1])
        torch.testing.assert_close(products[2], products[3])


def test_one_rank_for_all_is_that_rank(tmp_path):
    play(tmp_path / "run")
    sparing.export(tmp_path / "run", peft=tmp_path / "a")
    sparing.export(tmp_path / "run", peft=tmp_path / "b", rank=4)
    assert (tmp_path / "a" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "b" / "adapter_model.safetensors"
    ).read_bytes()
    assert read(tmp_path / "a")[1]["lora_alpha"] == 16


def test_moved_buffers_are_saved_with_their_layer(tmp_path):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.Linear(12, 10))
    data = [(torch.randn(20, 64), torch.randint(10, (20,))) for _ in range(4)]
    task = sparing.Task(net, data, data)
    method = [{"lora": {"targets": ["1"], "rank": 2}}]
    result = sparing.run(task, method, rounds=1, out=tmp_path / "run", local=QUICK["local"])
    with pytest.raises(ConfigError, match=r"was run on a task of your own.*pass it"):
        sparing.export(tmp_path / "run", peft=tmp_path / "a")
    sparing.export(tmp_path / "run", peft=tmp_path / "a", base=task)
    sparing.export(tmp_path / "run", peft=tmp_path / "b", base=task.build(0))
    tensors, config = read(tmp_path / "a")
    assert config["modules_to_save"] == ["2"]
    assert torch.equal(tensors[f"{BASE}2.running_mean"], result.model["2.running_mean"])
    assert tensors.keys() == read(tmp_path / "b")[0].keys()
    with pytest.raises(CheckpointError, match="trained on another network"):
        sparing.export(tmp_path / "run", peft=tmp_path / "c", base=nn.Sequential(*net[:3], nn.Linear(12, 10)))


def remade(net, **options):
    return remake_model(net, recipes_from_entries([{"lora": {"rank": 2, **options}}]))


def test_a_path_that_ends_another_is_a_pattern_for_the_whole():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    made = remade(net, targets=["0"])
    assert peft_form(made).config["target_modules"] == ["0", "1.0"]
    made[1][0] = made[1][0].base
    assert peft_form(made).config["target_modules"] == "0"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight


def test_layers_that_peft_would_run_otherwise_are_refused():
    attention = remade(nn.Sequential(nn.MultiheadAttention(8, 2)), targets=["out_proj"])
    with pytest.raises(MethodError, match=r"'0.out_proj' belongs to an nn.MultiheadAttention"):
        peft_form(attention)
    assert merged_tensors(attention).keys() == nn.Sequential(nn.MultiheadAttention(8, 2)).state_dict().keys()
    with pytest.raises(MethodError, match="'0' has dilation"):
        peft_form(remade(nn.Sequential(nn.Conv2d(3, 4, 3, dilation=2)), targets=["0"]))
    with pytest.raises(MethodError, match="'head' shares its weight with 'words"):
        merged_tensors(remade(Tied(), targets=["head"]))
    long = nn.ModuleDict({"first": nn.Linear(4, 4), "head": nn.Linear(4, 4), "subhead": nn.Linear(4, 4)})
    with pytest.raises(MethodError, match=r"'head' trained whole, but by that name peft would also find .*subhead"):
        peft_form(remade(long, targets=["first"], full=["head"]))
    bare = nn.ModuleDict({"first": nn.Linear(4, 4)})
    bare.register_parameter("token", nn.Parameter(torch.zeros(3)))
    with pytest.raises(MethodError, match=r"'token' changed in training and belongs to the network itself"):
        peft_form(remade(bare, targets=["first"], full=["token"]))


def test_half_precision_is_rounded_once():
    net = remade(nn.Sequential(nn.Linear(6, 5).to(torch.bfloat16)), targets=["0"])
    layer = net[0]
    assert isinstance(layer, Adapted)
    nn.init.normal_(layer.lora_b.weight)
    product = layer.scale * layer.lora_b.weight.double() @ layer.lora_a.weight.double()
    wanted = (layer.base.weight.double() + product).to(torch.bfloat16)
    assert torch.equal(merged_tensors(net)["0.weight"], wanted)
    assert peft_form(net).tensors[f"{BASE}0.lora_A.weight"].dtype == torch.float32
    assert list(adapted_layers(net)) == ["0"]


def typed(*words):
    done = CliRunner().invoke(app, ["export", *map(str, words)])
    return done.exit_code, " ".join(done.output.split())


def test_the_command(tmp_path):
    run = tmp_path / "run"
    play(run)
    code, said = typed(run, "--peft", tmp_path / "a", "--merged", tmp_path / "m", "--rank", 4)
    assert code == 0, said
    assert said.count("wrote") == 3
    code, said = typed(run, "--peft", tmp_path / "a")
    assert code == 2
    assert "is not empty, and an export replaces nothing" in said
    assert "rank is 3, and clients of this run have 4" in typed(run, "--peft", tmp_path / "b", "--rank", 3)[1]
    assert "add --peft FOLDER" in typed(run)[1]
    assert not (tmp_path / "b").exists()


def test_runs_that_have_nothing_to_export(tmp_path):
    play(tmp_path / "plain", method="topk")
    with pytest.raises(ConfigError, match="has no adapters: its method is topk"):
        sparing.export(tmp_path / "plain", peft=tmp_path / "a")
    with pytest.raises(Stop):
        sparing.run(TASKS["mlp"], adapters(), out=tmp_path / "half", loggers=[stop_after(1)], **QUICK)
    with pytest.raises(ConfigError, match=r"is not finished: 1 of 2 rounds; finish it with `sparing resume"):
        sparing.export(tmp_path / "half", peft=tmp_path / "a")
    play(tmp_path / "own", method=[*adapters(full=["dense1"], targets=["head"]), {"personal": {"layers": ["dense1"]}}])
    with pytest.raises(ConfigError, match=r"'dense1.weight' stays with each client"):
        sparing.export(tmp_path / "own", peft=tmp_path / "a")
    with pytest.raises(ConfigError, match="nowhere to write"):
        sparing.export(tmp_path / "own")
    with pytest.raises(ConfigError, match="holds no run"):
        sparing.export(tmp_path, peft=tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("options", [{"blend": "exact"}, {"blend": "stack", "ranks": [4, 1]}], ids=str)
def test_what_was_merged_is_in_the_network_and_in_no_adapter(tmp_path, options):
    method = adapters("cnn", **options)
    result = play(tmp_path / "run", "cnn", method=method)
    sparing.export(tmp_path / "run", merged=tmp_path / "network")
    merged, net = load_file(tmp_path / "network" / "model.safetensors"), network("cnn")
    assert merged.keys() == net.state_dict().keys()
    net.load_state_dict(merged)
    same_logits(net, network("cnn", method, result))
    with pytest.raises(MethodError, match="was merged into the base of 'conv1'"):
        sparing.export(tmp_path / "run", peft=tmp_path / "peft")
