"""A BERT classifier of transformers, as its authors wrote it, and its LoRA form by peft: dict inputs, counted bytes."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import sparing
from sparing.core.errors import ConfigError

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention, under vmap

WORDS, LENGTH = 50, 8
METHODS = {
    "fedavg": "fedavg",
    "sparse": "psfed+topk+int8+memory",
    "budget": [{"budget": {"bytes": "2kB"}}],
}


def bert(attention="sdpa"):
    """Attention drops nothing: it would not draw by client's key, which the stacked path refuses."""
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=LENGTH,
        num_labels=2,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )
    return transformers.BertForSequenceClassification(config)


def lora():
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.0)
    return peft.get_peft_model(bert(), config)


def sentences(n, seed, mask="padding"):
    """Sentences whose class is their first word's; some are shorter, and padded."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, WORDS, (n, LENGTH), generator=g)
    y = (ids[:, 0] < WORDS // 2).long()
    kept = torch.arange(LENGTH) < torch.randint(4, LENGTH + 1, (n, 1), generator=g)
    x = {"input_ids": ids * kept, "token_type_ids": torch.zeros_like(ids)}
    if mask == "padding":
        x["attention_mask"] = kept.long()
    elif mask == "added":  # what transformers itself makes of a padding mask, which it then need not look at
        x["attention_mask"] = torch.where(kept, 0.0, -1e9)[:, None, None, :]
    return x, y


def task(model=bert, mask="padding"):
    return sparing.Task(
        model,
        [sentences(20 + i, i, mask) for i in range(4)],
        [sentences(12, 10 + i, mask) for i in range(4)],
    )


def run(task, method="fedavg", path="loop", **study):
    local = {"epochs": 1, "batch": 8, "lr": 0.1}
    return sparing.run(task, method, rounds=2, sample=2, seed=1, local=local, plan={"path": path}, **study)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", [bert, lora])
def test_methods_count_bytes_the_same_on_every_path(model, method):
    runs = [run(task(model, "added"), METHODS[method], path) for path in ("loop", "loop-fast", "stacked")]
    assert all(one.accuracy == one.accuracy and one.loss < 1 for one in runs)
    if method == "budget":
        assert all(0 < one.up_bytes <= 2 * 2 * 2000 for one in runs)
    else:
        assert len({one.up_bytes for one in runs}) == 1
    for name, x in runs[0].model.items():
        for other in runs[1:]:
            torch.testing.assert_close(other.model[name], x, rtol=1e-3, atol=1e-2 if method != "fedavg" else 1e-4)


def test_adapters_send_far_less_than_the_whole_model():
    whole, adapters = run(task(bert)), run(task(lora))
    parameters = sum(p.numel() for p in bert().parameters())
    trained = sum(p.numel() for p in lora().parameters() if p.requires_grad)
    assert 4 * parameters * 4 <= whole.up_bytes <= 4 * parameters * 4 + 4 * 8000
    assert 4 * trained * 4 <= adapters.up_bytes <= 4 * trained * 4 + 4 * 8000
    assert adapters.up_bytes < whole.up_bytes / 5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_padding_mask_trains_on_the_loop_and_the_plan_knows(attention):
    """transformers branches on the values of a padding mask, which clients side by side cannot."""
    assert run(task(lambda: bert(attention)), path="auto").loss < 1
    with pytest.raises(ConfigError, match=r"plan\.path is stacked, but this model trains differently or not at all"):
        run(task(lambda: bert(attention)), path="stacked")


def test_the_debug_engine_agrees_to_the_last_bit():
    runs = [run(task(), METHODS["sparse"], engine=engine) for engine in ("vector", "debug")]
    assert runs[0].model_sha256 == runs[1].model_sha256
    assert runs[0].up_bytes == runs[1].up_bytes


def test_it_learns_what_a_first_word_says():
    data = sparing.Task(bert, [sentences(200, i) for i in range(2)], sentences(200, 9))
    local = {"epochs": 10, "batch": 16, "lr": 0.003, "optimiser": "adam"}
    assert sparing.run(data, rounds=2, sample=2, local=local).accuracy > 0.9


class Tokenized(Dataset):
    """As people keep them: one dict a sentence, of unequal length."""

    def __init__(self, n, seed):
        x, self.y = sentences(n, seed)
        self.rows = [
            ids[: int(kept.sum())].tolist()
            for ids, kept in zip(*(x[k] for k in ("input_ids", "attention_mask")), strict=True)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": int(self.y[i])}


def padded(items):
    """What a data collator of transformers gives."""
    width = [item["input_ids"] + [0] * (LENGTH - len(item["input_ids"])) for item in items]
    mask = [[int(i < len(item["input_ids"])) for i in range(LENGTH)] for item in items]
    labels = torch.tensor([item["labels"] for item in items])
    found = {"input_ids": torch.tensor(width), "attention_mask": torch.tensor(mask), "labels": labels}
    return transformers.BatchEncoding(found)


def test_loaders_with_a_collator_are_read_whole():
    loaders = [DataLoader(Tokenized(20, i), batch_size=4, shuffle=True, collate_fn=padded) for i in range(3)]
    held = DataLoader(Subset(Tokenized(20, 9), range(12)), batch_size=4, collate_fn=padded)
    data = sparing.Task(bert, loaders, held)
    assert data.train.count.tolist() == [20] * 3
    assert data.train.x.names == ("input_ids", "attention_mask")
    assert len(data.test_all[1]) == 12
    assert run(data).loss < 1


def test_a_metric_of_torchmetrics():
    torchmetrics = pytest.importorskip("torchmetrics")
    score = torchmetrics.classification.MulticlassF1Score(num_classes=2, average="macro")
    held = task()
    data = sparing.Task(bert, held.train, held.test, metric=["macro_f1", score])
    last = run(data).table[-1].metrics
    assert last["MulticlassF1Score"] == pytest.approx(last["macro_f1"], rel=1e-5)
