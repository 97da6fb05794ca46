"""Networks that peft has wrapped: `lora` takes its adapters over, trains them, gives them back; others are named."""

import pytest
import torch

import sparing
from models_of_others.test_peft_files import LOCAL, bert, loaded, sentences
from sparing.core.compose import remake_model
from sparing.core.errors import MethodError
from sparing.parts.size.lora.adapted import Adapted
from sparing.runs.recipe_entries import recipes_from_entries

peft = pytest.importorskip("peft")
WHERE = ["query", "value"]


def wrapped(net=None, **options):
    given = {"r": 4, "lora_alpha": 8, "target_modules": WHERE, "task_type": "SEQ_CLS", **options}
    return peft.get_peft_model(net or bert(), peft.LoraConfig(**given))


def method(**options):
    return [{"lora": {"rank": 4, "alpha": 8, "full": ["classifier"], **options}}]


def same_logits(one, other):
    x, _ = sentences(6, 3)
    with torch.no_grad():
        torch.testing.assert_close(one(**x).logits, other(**x).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("root", [False, True])
def test_the_same_network_without_peft(root):
    net = wrapped(init_lora_weights=False, use_rslora=root).eval()
    found = remake_model(net, recipes_from_entries(method(scale="root" if root else "rank"))).eval()
    assert sum(isinstance(layer, Adapted) for layer in found.modules()) == 4
    assert not any("lora_A" in name or "base_model" in name for name, _ in found.named_parameters())
    same_logits(found, net)


@pytest.mark.parametrize("blend", ["average", "svd"])
def test_what_was_wrapped_trains_and_goes_back_to_peft(tmp_path, blend):
    def build():
        return wrapped(lora_dropout=0.1)

    task = sparing.Task(build, [sentences(20, i) for i in range(4)], sentences(12, 9))
    result = sparing.run(task, method(blend=blend), rounds=2, seed=3, local=LOCAL, out=tmp_path / "run")
    sparing.export(tmp_path / "run", peft=tmp_path / "adapter", base=task)
    net = task.build(3)
    ours = remake_model(net, recipes_from_entries(method(blend=blend)), seed=3)
    ours.load_state_dict(result.model)
    base = net.unload() if hasattr(net, "unload") else net.base_model.unload()
    same_logits(loaded(base, tmp_path / "adapter"), ours.eval())
    assert any(x.any() for name, x in result.model.items() if name.endswith("lora_b.weight"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda: peft.IA3Config(task_type="SEQ_CLS", target_modules=WHERE, feedforward_modules=[]), "by IA3"),
        (lambda: peft.LoHaConfig(task_type="SEQ_CLS", target_modules=WHERE), "by LOHA"),
        (lambda: peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2), "by PROMPT_TUNING"),
        (lambda: peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules=WHERE, use_dora=True), "DoRA"),
        (lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=["word_embeddings"]), "an embedding"),
        (lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=WHERE, lora_bias=True), "a bias in lora_B"),
        (lambda: peft.LoraConfig(r=4, lora_alpha=8, target_modules=WHERE, bias="all"), "is not frozen"),
    ],
    ids=["ia3", "loha", "prompts", "dora", "embedding", "bias of B", "biases"],
)
def test_other_kinds_are_named(config, said):
    net = peft.get_peft_model(bert(), config())
    with pytest.raises(MethodError, match=said):
        remake_model(net, recipes_from_entries(method()))


def test_an_adapter_that_is_merged_or_not_alone():
    net = wrapped()
    net.merge_adapter()
    with pytest.raises(MethodError, match="merged into its base"):
        remake_model(net, recipes_from_entries(method()))
    net = wrapped()
    net.add_adapter("second", peft.LoraConfig(r=2, target_modules=WHERE))
    with pytest.raises(MethodError, match="names default, second"):
        remake_model(net, recipes_from_entries(method()))
