"""Adapters that were trained here, loaded by peft: the same logits as the run's own network."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sparing
from sparing.core.compose import remake_model
from sparing.parts.size.lora.adapted import Adapted
from sparing.parts.size.lora.peft_form import peft_form
from sparing.runs.recipe_entries import recipes_from_entries

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
WORDS, LENGTH = 50, 8
LOCAL = {"steps": 5, "batch": 8, "lr": 0.02, "optimiser": "adam"}


def bert():
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=2,
        initializer_range=0.3,
    )
    return transformers.BertForSequenceClassification(config)


def sentences(n, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (n, LENGTH), generator=g)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, (ids[:, 0] < WORDS // 2).long()


def task():
    return sparing.Task(bert, [sentences(20, i) for i in range(4)], sentences(12, 9))


class Images(nn.Module):
    """Convolutions with a kernel, a stride and a padding, a norm with buffers, and a path that ends another."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.then = nn.ModuleDict({"first": nn.Conv2d(6, 6, 3, padding="same"), "dense": nn.Linear(96, 8)})
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return self.head(torch.relu(self.then["dense"](torch.relu(self.then["first"](x)).flatten(1))))


def images():
    g = torch.Generator().manual_seed(0)
    sets = [(torch.randn(20, 1, 8, 8, generator=g), torch.randint(3, (20,), generator=g)) for _ in range(5)]
    return sparing.Task(Images, sets[:4], sets[4])


def loaded(net, folder):
    return peft.PeftModel.from_pretrained(net, folder).eval()


def trained(net, method, result):
    net = remake_model(net, recipes_from_entries(method))
    net.load_state_dict(result.model)
    return net.eval()


@torch.no_grad()
def same(one, other, **x):
    torch.testing.assert_close(one(**x), other(**x), rtol=1e-5, atol=1e-5)


class Logits(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, **x):
        return self.net(**x).logits


TEXT = {
    "equal": {"rank": 2},
    "root": {"rank": 2, "scale": "root", "full": ["classifier"]},
    "unequal": {"ranks": [4, 2], "keep": "all"},
}


@pytest.mark.parametrize("options", TEXT.values(), ids=TEXT.keys())
def test_peft_loads_what_a_bert_has_learned(tmp_path, options):
    method, data = [{"lora": {"targets": ["query", "value"], **options}}], task()
    result = sparing.run(data, method, rounds=2, seed=1, local=LOCAL, out=tmp_path / "run")
    sparing.export(tmp_path / "run", peft=tmp_path / "adapter", merged=tmp_path / "merged", base=data)
    ours, x = Logits(trained(data.build(1), method, result)), sentences(9, 77)[0]
    theirs = loaded(data.build(1), tmp_path / "adapter")
    same(ours, Logits(theirs), **x)
    same(ours, Logits(theirs.merge_and_unload()), **x)
    merged = bert().eval()
    merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    same(ours, Logits(merged), **x)
    with pytest.raises(AssertionError):
        same(ours, Logits(data.build(1).eval()), **x)


def test_peft_loads_a_client_of_lower_rank(tmp_path):
    method, data = [{"lora": {"targets": ["query", "value"], "ranks": [4, 2], "scale": "rank"}}], task()
    sparing.run(data, method, rounds=2, seed=1, local=LOCAL, out=tmp_path / "run")
    sparing.export(tmp_path / "run", peft=tmp_path / "adapter", merged=tmp_path / "merged", rank=2, base=data)
    merged, x = bert().eval(), sentences(9, 77)[0]
    merged.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    same(Logits(merged), Logits(loaded(data.build(1), tmp_path / "adapter")), **x)


IMAGES = {
    "equal": {"targets": ["first", "dense"], "rank": 3, "full": ["head"]},
    "unequal": {"targets": ["first"], "ranks": [5, 2], "keep": "all"},
}


@pytest.mark.parametrize("options", IMAGES.values(), ids=IMAGES.keys())
def test_peft_loads_convolutions_and_moved_buffers(tmp_path, options):
    method, data = [{"lora": options}], images()
    result = sparing.run(data, method, rounds=2, seed=1, local=LOCAL, out=tmp_path / "run")
    sparing.export(tmp_path / "run", peft=tmp_path / "adapter", base=data)
    theirs, x = loaded(data.build(1), tmp_path / "adapter"), torch.randn(7, 1, 8, 8)
    same(trained(data.build(1), method, result), theirs, x=x)
    assert "norm" in json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["modules_to_save"]
    without = data.build(1).eval()
    without.load_state_dict(theirs.unload().state_dict())
    with pytest.raises(AssertionError):
        same(trained(data.build(1), method, result), without, x=x)


def test_a_path_that_ends_another_finds_its_layer_alone(tmp_path):
    net = remake_model(Images(), recipes_from_entries([{"lora": {"targets": ["first"], "rank": 3}}])).eval()
    net.then["first"] = net.then["first"].base
    nn.init.normal_(net.first.lora_b.weight)
    assert isinstance(net.first, Adapted)
    form = peft_form(net)
    save_file(form.tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(form.config))
    base = Images().eval()
    frozen = {name: x for name, x in net.state_dict().items() if "lora_" not in name}
    base.load_state_dict({name.replace("first.base", "first"): x for name, x in frozen.items()})
    same(net, loaded(base, tmp_path), x=torch.randn(7, 1, 8, 8))
