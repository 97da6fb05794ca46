"""Networks that peft has wrapped, by an imitation of its modules: taken over, or refused by name."""

import math

import pytest
import torch
from torch import nn

import sparing
from sparing.core.compose import compose, remake_model
from sparing.core.errors import MethodError
from sparing.core.tree import layout_of
from sparing.parts.size.lora.adapted import Adapted
from sparing.runs.recipe_entries import recipes_from_entries


class LoraLayer(nn.Module):
    adapter_layer_names = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")

    def __init__(self, base, r=2, alpha=8, drop=0.0, name="default", root=False):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({name: nn.Dropout(drop) if drop else nn.Identity()})
        if isinstance(base, nn.Linear):
            a, b = nn.Linear(base.in_features, r, bias=False), nn.Linear(r, base.out_features, bias=False)
        else:
            how = {"stride": base.stride, "padding": base.padding, "bias": False}
            a = nn.Conv2d(base.in_channels, r, base.kernel_size, **how)
            b = nn.Conv2d(r, base.out_channels, 1, bias=False)
        self.lora_A, self.lora_B = nn.ModuleDict({name: a}), nn.ModuleDict({name: b})
        self.lora_embedding_A, self.lora_magnitude_vector = nn.ParameterDict(), nn.ModuleDict()
        self.scaling, self.use_dora, self.merged_adapters = (
            {name: alpha / (math.sqrt(r) if root else r)},
            {name: False},
            [],
        )
        nn.init.zeros_(b.weight)

    def forward(self, x):
        out = self.base_layer(x)
        for name, a in self.lora_A.items():
            out = out + self.lora_B[name](a(self.lora_dropout[name](x))) * self.scaling[name]
        return out


class WholeLayer(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.original_module, self.modules_to_save = (
            layer.requires_grad_(False),
            nn.ModuleDict({"default": nn.Linear(5, 3)}),
        )

    def forward(self, x):
        return self.modules_to_save["default"](x)


class Config:
    def __init__(self, kind="LORA"):
        self.peft_type = kind


class PeftModel(nn.Module):
    def __init__(self, network, kind="LORA"):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = network
        self.peft_config = {"default": Config(kind)}

    def forward(self, x):
        return self.base_model.model(x)


def network(**options):
    """A convolution and a dense layer, each with an adapter."""
    torch.manual_seed(1)
    conv = LoraLayer(nn.Conv2d(1, 4, 3, stride=2, padding=1), **options)
    dense = LoraLayer(nn.Linear(64, 5), **options)
    net = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), dense, nn.ReLU(), nn.Linear(5, 3))
    net[5].requires_grad_(False)
    return net


def taken(net, **options):
    made = recipes_from_entries([{"lora": {"rank": 2, "alpha": 8, **options}}])
    return remake_model(net, made), made


def test_adapters_go_on_from_what_peft_holds():
    net = network()
    for layer in (net[0], net[3]):
        nn.init.normal_(layer.lora_B["default"].weight)
    x = torch.randn(6, 1, 8, 8)
    for given in (net, PeftModel(net)):
        found, made = taken(given)
        assert isinstance(found[0], Adapted)
        assert torch.allclose(found(x), net(x), atol=1e-5)
        assert torch.equal(found[3].lora_a.weight, net[3].lora_A["default"].weight)
        assert list(layout_of(found).shapes) == [f"{i}.lora_{side}.weight" for i in (0, 3) for side in "ab"], (
            "nothing of peft's names is left"
        )
        compose(layout_of(found), *made)
    assert "base_layer" in dict(net[0].named_children()), "what was handed in stays"


def test_ranks_below_are_the_first_rows_and_scales_are_those_of_peft():
    for root in (False, True):
        net = network(r=4, alpha=4, root=root)
        found, _ = taken(net, ranks=[4, 2], alpha=4, scale="root" if root else "shared")
        assert torch.equal(found[3].lora_a.weight, net[3].lora_A["default"].weight)
        assert found[3].scale == (2.0 if root else 1.0)


def test_dropout_before_an_adapter_stays():
    net = network(drop=0.5)
    nn.init.normal_(net[3].lora_B["default"].weight)
    found, _ = taken(net)
    x = torch.randn(2, 1, 8, 8)
    assert torch.allclose(found.eval()(x), net.eval()(x), atol=1e-5)
    found.train()
    assert not torch.equal(found(x), found(x))


def test_layers_that_peft_trains_whole_are_named():
    net = network()
    net[5] = WholeLayer(net[5])
    with pytest.raises(MethodError, match=r"'5.weight' .* is not frozen; .* name '5' in lora.full"):
        taken(net)
    found, made = taken(net, full=["5"])
    assert type(found[5]) is nn.Linear
    assert torch.equal(found[5].weight, net[5].modules_to_save["default"].weight)
    assert {"5.weight", "5.bias"} <= set(compose(layout_of(found), *made).layout.params)


def test_they_train():
    samples = [(torch.randn(12, 1, 8, 8), torch.arange(12) % 3) for _ in range(3)]

    def task(build):
        return sparing.Task(build, train=samples, test=samples[0])

    study = {"rounds": 2, "seed": 1, "local": {"steps": 3, "lr": 0.1}}
    for blend in ("average", "exact", "stack"):
        method = [{"lora": {"rank": 2, "alpha": 8, "blend": blend}}]
        runs = [sparing.run(task(make), method, engine=engine, plan={"path": "loop"}, **study)
                for make in (network, lambda: PeftModel(network())) for engine in ("vector", "debug")]  # fmt: skip
        assert len({run.model_sha256 for run in runs}) == 1
        assert runs[0].model["3.lora_b.weight" if blend != "stack" else "3.merged.weight"].any()


def broken(**changes):
    net = network()
    for path, value in changes.items():
        setattr(net[3], path, value)
    return net


def other_layer(base, **modules):
    layer = nn.Module()
    layer.base_layer, layer.adapter_layer_names = base, tuple(modules)
    for name, module in modules.items():
        setattr(layer, name, module)
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("net", "options", "said"),
    [
        (network(r=4), {}, "lora.rank, or the largest of lora.ranks, is 2, .* at rank 4"),
        (network(alpha=16), {}, "make a scale of 4, but peft's adapter of '0' has 8; write alpha: 16"),
        (network(root=True), {}, "write alpha: 11.3.*, or scale: root"),
        (network(), {"targets": ["3"]}, "peft has wrapped other layers: '0' is in one of them only"),
        (network(), {"targets": ["0", "3", "5"]}, "'5' is in one of them only"),
        (broken(lora_A=nn.ModuleDict({n: nn.Linear(64, 2) for n in "xy"})), {}, "names x, y"),
        (broken(use_dora={"default": True}), {}, "DoRA"),
        (broken(lora_magnitude_vector=nn.ModuleDict({"default": nn.Identity()})), {}, "DoRA"),
        (broken(lora_B=nn.ModuleDict({"default": nn.Linear(2, 5)})), {}, "a bias in lora_B"),
        (broken(merged_adapters=["default"]), {}, "merged into its base"),
        (broken(base_layer=nn.Bilinear(2, 2, 2)), {}, "a layer of type Bilinear"),
        (broken(lora_embedding_A=nn.ParameterDict({"default": nn.Parameter(torch.zeros(1))})), {}, "an embedding"),
        (other_layer(nn.Linear(2, 2), ia3_l=nn.ParameterDict()), {}, r"another kind \(ia3_l\)"),
        (other_layer(nn.Linear(2, 2), hada_w1_a=nn.ParameterDict()), {}, r"another kind \(hada_w1_a\)"),
        (PeftModel(network(), "PROMPT_TUNING"), {}, "by PROMPT_TUNING, and lora takes over LoRA only"),
        (broken(base_layer=nn.Linear(64, 5)), {}, r"'3.weight' .* is not frozen"),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else str(x),
)  # fmt: skip
def test_what_cannot_be_taken_over_is_named(net, options, said):
    with pytest.raises(MethodError, match=said):
        taken(net, **options)


def test_stacking_begins_with_adapters_that_say_nothing():
    net = network()
    taken(net, blend="stack")
    nn.init.normal_(net[3].lora_B["default"].weight)
    with pytest.raises(MethodError, match="on '3' is trained already"):
        taken(net, blend="stack")
