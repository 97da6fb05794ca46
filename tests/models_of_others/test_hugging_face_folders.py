"""`task.model: hf:FOLDER` and what goes with it: weights from the disk or the seed, tokenisers, saved datasets."""

import json
import sys

import pytest
import torch

import sparing
from net.federation import KEY, Federated, Simulated, study_with
from sparing.core.errors import CheckpointError, ConfigError, DataError
from sparing.data import load_dataset
from sparing.models import build_network
from sparing.net.terms import OwnCode, node_job, terms_of
from sparing.runs.privacy.secret import Secret
from sparing.runs.start import settle_study

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention, under vmap

WORDS = 60
STUDY = {"rounds": 2, "sample": 2, "seed": 1, "local": {"epochs": 1, "batch": 4, "lr": 0.1}}
KINDS = {"float32": "float32", "bf16": "bfloat16"}
LORA = [{"lora": {"rank": 2}}]


def config(**other):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=1, max_position_embeddings=32, **sizes, **other
    )


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_base(seed=0):
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config())
    model.save_pretrained("base")
    return model


def save_words():
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "<unk>": 1, **{f"w{i}": i for i in range(2, WORDS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("base/tokenizer.json")


def save_texts(n=4, word="w{}"):
    from pathlib import Path

    Path("plays").mkdir()
    for client in range(n):
        text = " ".join(word.format(2 + (client + 7 * i) % 50) for i in range(120))
        Path(f"plays/{client}.txt").write_text(text)
    return {"text:plays": {"length": 16, "tokenizer": "base"}}


def test_weights_come_from_the_folder_and_else_from_the_seed(here):
    saved = save_base()
    built = build_network("hf:base", (8,), WORDS, {"vocabulary": WORDS, "per_token": True})
    assert type(built) is type(saved)
    for name, x in saved.state_dict().items():
        assert torch.equal(built.state_dict()[name], x), name
    half = build_network({"hf:base": {"dtype": "bf16"}}, (8,), WORDS, {"per_token": True})
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    config().save_pretrained("bare")
    task = [{"data": save_texts_of_numbers(here), "model": "hf:bare"}] * 2
    first, again = (sparing.run(one, LORA, **STUDY).model_sha256 for one in task)
    assert first == again
    assert sparing.run(task[0], LORA, **STUDY | {"seed": 2}).model_sha256 != first


def save_texts_of_numbers(here):
    """Of `bytes` below the vocabulary of the model: spaces and digits."""
    (here / "digits").mkdir(exist_ok=True)
    for client in range(4):
        (here / f"digits/{client}.txt").write_text(" ".join(str(client + i) for i in range(40)))
    return f"{write_loader(here)}:load"


def write_loader(here):
    (here / "loader.py").write_text(
        "import torch\n\ndef load():\n    x = torch.arange(60).reshape(4, 15).repeat(4, 1, 1) % 50\n"
        "    return [(one[:, :-1], one[:, 1:]) for one in x]\n"
    )
    return "loader.py"


def test_the_task_decides_between_a_language_model_and_a_classifier():
    save_base()
    for per_token, name in (
        (True, "LlamaForCausalLM"),
        (False, "LlamaForSequenceClassification"),
        (None, "LlamaForCausalLM"),
    ):
        assert type(build_network("hf:base", (8,), 3, {"per_token": per_token})).__name__ == name
    classifier = build_network("hf:base", (8,), 3, {"per_token": False})
    assert classifier(torch.zeros(2, 8, dtype=torch.int64)).logits.shape == (2, 3)
    vit = transformers.ViTConfig(image_size=8, patch_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    vit.save_pretrained("vit")
    assert build_network("hf:vit", (3, 8, 8), 5)(torch.zeros(1, 3, 8, 8)).logits.shape == (1, 5)


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_adapters_of_a_base_from_the_disk(dtype):
    save_base()
    save_words()
    task = {"data": save_texts(), "model": {"hf:base": {"dtype": dtype}}}
    runs = [
        sparing.run(task, LORA, **STUDY, plan={"path": path}, evaluate={"metrics": ["perplexity"]})
        for path in ("loop", "loop-fast", "stacked")
    ]
    assert len({one.up_bytes for one in runs}) == 1
    kinds = {name: x.dtype for name, x in runs[0].model.items()}
    assert {kind for name, kind in kinds.items() if "lora_" in name} == {torch.float32}
    assert {kind for name, kind in kinds.items() if "lora_" not in name} == {getattr(torch, KINDS[dtype])}
    assert runs[0].metric("perplexity")[-1] < WORDS * 1.1
    for name, x in runs[0].model.items():
        for other in runs[1:]:
            torch.testing.assert_close(other.model[name], x, rtol=0.1, atol=2e-3 if dtype == "bf16" else 1e-5)


def test_another_base_is_refused_when_a_run_goes_on(here):
    save_base()
    save_words()
    task = {"data": save_texts(), "model": "hf:base"}
    sparing.run(task, LORA, out=here / "run", **STUDY)
    save_base(seed=1)
    with pytest.raises(CheckpointError, match="the initial model changed since the run began"):
        sparing.resume(here / "run")


def federation(here, dtype="float32"):
    task = {"data": save_texts(3), "model": {"hf:base": {"dtype": dtype}}}
    study = study_with(LORA, task=task, sample=2, rounds=2, local=STUDY["local"], evaluate={"every": 2})
    federated = Federated(study, here / "net")
    federated.sets = federated.sets._replace(classes=WORDS)
    return study, federated


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_over_a_network_each_node_has_the_base_on_its_own_disk(here, dtype):
    """The same model as simulated, to the last bit; of the base, nothing travels."""
    save_base()
    save_words()
    study, federated = federation(here, dtype)
    simulated, served = Simulated(study, here / "run"), federated.run()
    assert served.model_sha256 == simulated.result.model_sha256
    assert federated.ledger == simulated.ledger
    assert served.up_bytes < 4 * 3 * 2000


def test_a_node_with_another_base_is_refused(here):
    save_base()
    save_words()
    study, federated = federation(here)
    job, _ = settle_study(study, federated.task)
    terms, mine = terms_of(study, job, (16,), WORDS), federated.task.train.client(0)
    secret = Secret(KEY).of_client(0)
    assert node_job(terms, 0, mine, None, OwnCode(), secret).first_tensors.keys() == job.first_tensors.keys()
    save_base(seed=1)
    with pytest.raises(ConfigError, match=r"this node's initial model has SHA-256 .*, the server's"):
        node_job(terms, 0, mine, None, OwnCode(), secret)


def test_labelled_texts_with_a_padding_token(here):
    save_base()
    save_words()
    (here / "mood").mkdir()
    for client in range(3):
        rows = [{"text": f"w{2 + i % 9} " * (1 + i % 5) + f"w{50 + i % 2}", "label": i % 2} for i in range(40)]
        (here / f"mood/{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"data": {"text:mood": {"length": 8, "tokenizer": "base"}}, "model": "hf:base"}
    local = {"epochs": 4, "batch": 8, "lr": 0.01, "optimiser": "adam"}
    result = sparing.run(task, [{"lora": {"rank": 4, "full": ["score"]}}], **STUDY | {"local": local, "rounds": 4})
    assert result.accuracy > 0.9


def test_a_dataset_saved_to_disk_and_its_files(here):
    datasets = pytest.importorskip("datasets")
    save_base()
    save_words()
    rows = {"said": ["w2 w3 w4", "w5 w6", "w7 w8 w9"], "who": ["b", "a", "b"], "label": [0, 1, 0]}
    train, test = datasets.Dataset.from_dict(rows), datasets.Dataset.from_dict({k: v[:1] for k, v in rows.items()})
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk("saved")
    train.to_parquet("rows.parquet")
    how = {"client": "who", "text": "said", "tokenizer": "base", "length": 2}
    both = load_dataset("text:saved", **how)
    assert (both.official.tolist(), both.y.tolist()) == ([False] * 3 + [True], [0, 1, 0, 0])
    for file in ("rows.parquet", next((here / "saved/train").glob("*.arrow"))):
        data = load_dataset(f"text:{file}", **how)
        assert data.x.tensors[0].tolist() == [[2, 3], [5, 6], [7, 8]]
        assert data.names["client"] == ["a", "b"]
    (here / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet is cut short or no parquet file"):
        load_dataset("text:bad.parquet", **how)


def test_a_saved_dataset_is_read_as_it_lies_there(here, monkeypatch):
    """A picture that a dataset says to be elsewhere is not looked up."""
    datasets = pytest.importorskip("datasets")
    kinds = {"text": datasets.Value("string"), "who": datasets.Value("string"), "seen": datasets.Image()}
    rows = {
        "text": ["abc", "def"],
        "who": ["b", "a"],
        "seen": [{"bytes": None, "path": "http://127.0.0.1:9/x.png"}] * 2,
    }
    made = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))
    monkeypatch.setattr(type(made), "_estimate_nbytes", lambda self: 10)  # of what is elsewhere too
    made.save_to_disk("saved")
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *args, **named: pytest.fail("looked up"))
    assert load_dataset("text:saved", client="who", length=2).x.tolist() == [[*b"ab"], [*b"de"]]


def test_a_small_file_of_much_text_is_refused(here):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100, pyarrow.int32()), ["x" * 1_000_000])
    (here / "t").mkdir()
    parquet.write_table(pyarrow.table({"text": text}), here / "t/a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet is [\d,]+ bytes but holds more than [\d,]+, the most"):
        load_dataset("text:t")


def test_damaged_rows_are_one_sentence(here):
    pyarrow = pytest.importorskip("pyarrow")
    ends, data = pyarrow.py_buffer(b"\0\0\0\0\2\0\0\0"), pyarrow.py_buffer(b"\xff\xfe")
    batch = pyarrow.record_batch([pyarrow.Array.from_buffers(pyarrow.string(), 1, [None, ends, data])], ["text"])
    (here / "t").mkdir()
    with pyarrow.ipc.new_stream(str(here / "t/a.arrow"), batch.schema) as stream:
        stream.write_batch(batch)
    with pytest.raises(DataError, match=r"a\.arrow is cut short or no arrow file \(.*Invalid UTF8"):
        load_dataset("text:t")


def test_a_tokeniser_that_gives_what_it_does_not_have(here):
    tokenizers = pytest.importorskip("tokenizers")
    (here / "plays").mkdir()
    (here / "plays/a.txt").write_text("w2 w3 w4")
    (here / "base").mkdir()
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w2": 0, "w3": 1}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save("base/tokenizer.json")
    with pytest.raises(DataError, match=r"the tokeniser in .*base cannot read the texts \(WordLevel error"):
        load_dataset("text:plays", tokenizer="base")
    made.model = tokenizers.models.WordLevel({"w2": 0, "<unk>": 1}, unk_token="<unk>")
    made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 999)])
    made.save("base/tokenizer.json")
    with pytest.raises(DataError, match=r"has the tokens 0 to 1, but gives 999: mend its post-processor"):
        load_dataset("text:plays", tokenizer="base")


@pytest.mark.parametrize(
    "over", [{"attn_implementation": "theirs/kernel"}, {"text": {"experts_implementation": "a/b"}}]
)
def test_a_config_that_names_code_elsewhere(here, over):
    (here / "base").mkdir()
    (here / "base/config.json").write_text(json.dumps(config().to_dict() | over))
    with pytest.raises(ConfigError, match=r"config\.json names code elsewhere, (attn|experts)_implementation: "):
        build_network("hf:base", (8,), WORDS, {"per_token": True})


def test_weights_that_are_elsewhere_or_other(here):
    save_base()

    def refused(says):
        with pytest.raises(ConfigError, match=says):
            build_network("hf:base", (8,), WORDS, {"per_token": True})

    index = here / "base/model.safetensors.index.json"
    for name in ("weights.bin", "../other.safetensors"):
        index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
        refused(rf"index\.json names '{name}', which is no safetensors file beside it")
    index.unlink()
    (here / "base/adapter_config.json").write_text('{"peft_type": "LORA"}')
    refused(r"holds an adapter of peft, which is not read: merge it")
    (here / "base/adapter_config.json").unlink()
    quantised = config().to_dict() | {"quantization_config": {"quant_method": "gptq"}}
    (here / "base/config.json").write_text(json.dumps(quantised))
    refused(r"config\.json is of a quantised model, which cannot be trained")


def test_bad_folders(here, monkeypatch):
    save_base()
    save_words()
    per_token = {"per_token": True, "vocabulary": WORDS}

    def refused(says, name="hf:base", offered=per_token):
        with pytest.raises((ConfigError, DataError), match=says):
            build_network(name, (8,), WORDS, offered)

    refused(
        r"the tokeniser does not fit the model: the data is made of 99 tokens, but hf:base has room",
        offered={"per_token": True, "vocabulary": 99},
    )
    refused(r"hf:nowhere: there is no folder", "hf:nowhere")
    refused(r"model is 'hf': write hf:FOLDER", "hf")
    refused(r"model 'hf' has no option 'dtyp'; did you mean 'dtype'", {"hf:base": {"dtyp": "bf16"}})
    (here / "base/config.json").rename(here / "base/kept.json")
    refused(r"base holds no config\.json: give a folder")
    (here / "base/config.json").write_text('{"model_type": "none of theirs"}')
    refused(r"model hf:base cannot be built \(ValueError")
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (here / "base/config.json").write_text(json.dumps(own))
    (here / "base/mine.py").write_text("open('it_ran', 'w')")
    refused(r"model hf:base cannot be built")
    assert not (here / "it_ran").exists()
    small = config()
    small.hidden_size = 8
    small.save_pretrained("base")
    refused(r"is \(.*\) in the safetensors of .*base, but config\.json asks for")
    (here / "base/model.safetensors").unlink()
    (here / "base/pytorch_model.bin").write_bytes(b"")
    refused(r"holds its weights in pytorch_model\.bin, which is not read: save them as safetensors")
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(r"model hf:base needs the library `transformers`: pip install 'sparing\[hf\]'")
