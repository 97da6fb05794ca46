"""Texts by client: files, folders, rows and LEAF's users, as sequences for a language model or a classifier."""

import json
import sys

import pytest
import torch
from formats import write_leaf

import sparing
from sparing.core.errors import DataError
from sparing.data import load_dataset
from sparing.data.inputs import Inputs

LOCAL = {"epochs": 1, "batch": 4, "lr": 0.1}


def put(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return f"text:{folder}"


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def said(row):
    return bytes(row.tolist()).decode()


def test_files_and_folders_are_clients(tmp_path):
    name = put(
        tmp_path / "t", {"b10.txt": "abcdefg", "b9/1.txt": "hello", "b9/2.txt": "x", "notes.md": "no", "c.txt": "é"}
    )
    data = load_dataset(name, length=3)
    assert data.names["client"] == ["b9", "b10", "c"]
    assert data.groups["client"].tolist() == [1, 1, 0, 0, 2]
    assert said(data.x[0]) == "abc"
    assert said(data.y[0]) == "bcd"
    assert data.x[2:4].tolist() == [[*b"hel"], [*b"l", 0, 0]]
    assert data.y[2:4].tolist() == [[*b"ell"], [*b"o", -100, -100]]  # "x" alone leaves nothing to guess
    assert (data.classes, data.vocabulary, data.official) == (256, 256, None)


def test_characters_and_a_second_read_from_the_cache(tmp_path):
    name = put(tmp_path / "t", {"a.txt": "To be\n", "b.txt": "ab"})
    for _ in range(2):
        data = load_dataset(name, length=5, tokenizer="characters")
        assert data.x.tolist()[0] == [54, 81, 2, 68, 71]
        assert (data.classes, data.vocabulary) == (97, 97)
    assert load_dataset(name, length=5).x.tolist()[0] == [*b"To be"]


def test_rows_with_labels_are_padded_and_masked(tmp_path):
    ann = lines({"text": "good", "label": "yes"}, {"text": "bad", "label": "no"})
    files = {"ann.jsonl": ann, "bob.jsonl": lines({"text": "so", "label": "yes"})}
    for _ in range(2):
        data = load_dataset(put(tmp_path / "t", files), length=3)
        assert isinstance(data.x, Inputs)
        assert data.x.names == ("input_ids", "attention_mask")
        assert data.x.tensors[0].tolist() == [[*b"goo"], [*b"bad"], [*b"so", 0]]
        assert data.x.tensors[1].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]
        assert (data.y.tolist(), data.names["class"], data.classes) == ([1, 0, 1], ["no", "yes"], 2)


def test_a_column_names_the_client_and_folders_the_test_set(tmp_path):
    rows = [{"said": "aa", "who": 3}, {"said": "bbb", "who": "x"}]
    name = put(tmp_path / "t", {"train/a.jsonl": lines(*rows), "test/a.jsonl": lines({"said": "cc", "who": 3})})
    data = load_dataset(name, length=2, client="who", text="said")
    assert data.official.tolist() == [False, False, True]
    assert [data.names["client"][i] for i in data.groups["client"]] == ["3", "x", "3"]
    alone = put(tmp_path / "one", {"rows.jsonl": lines(*rows)}) + "/rows.jsonl"
    assert load_dataset(alone, length=2, client="who", text="said").names["client"] == ["3", "x"]


def test_leaf(tmp_path):
    tweet = {"x": [["1", "date", "q", "me", "so good", "tag"]], "y": [1]}
    guessed = [["a", "b", "c"], ["d", "<PAD>", "<PAD>"]]
    comment = {"x": [[["<BOS>", "a", "b"], ["c", "<PAD>", "<PAD>"]]], "y": [{"target_tokens": guessed}]}
    write_leaf(tmp_path / "plays", [{"HAM": {"x": ["abc"], "y": ["d"]}}], [{"HAM": {"x": ["bcd"], "y": ["e"]}}])
    write_leaf(tmp_path / "tweets", [{"me": tweet}], [{"you": tweet}])
    write_leaf(tmp_path / "reddit", [{"me": comment}], [{"you": comment}])
    plays = load_dataset(f"text:{tmp_path}/plays", length=3)
    assert (said(plays.x[0]), said(plays.y[1]), plays.official.tolist()) == ("abc", "cde", [False, True])
    tweets = load_dataset(f"text:{tmp_path}/tweets", length=8)
    assert (said(tweets.x.tensors[0][0, :7]), tweets.y.tolist(), tweets.names["client"]) == (
        "so good",
        [1, 1],
        ["me", "you"],
    )
    assert said(load_dataset(f"text:{tmp_path}/reddit", length=6).y[0]) == " b c d"


@pytest.mark.parametrize(
    ("files", "options", "says"),
    [
        ({"a.txt": b"ab\xff"}, {}, r"a\.txt is no UTF-8 at byte 2 \(0xff\): save it as UTF-8"),
        ({"a.jsonl": lines({"text": "ab"}) + "{"}, {}, r"a\.jsonl, line 2 is no json \(Expecting"),
        ({"a.jsonl": "[" * 100_000}, {}, r"a\.jsonl, line 1 is no json"),
        ({"a.jsonl": "[1]"}, {}, r"line 1 holds a list: write an object"),
        ({"a.jsonl": lines({"text": 7})}, {}, r"line 1: text is 7, which is no text: quote it"),
        (
            {"a.jsonl": lines({"txet": "ab"})},
            {},
            r"line 1 has no 'text': name the column as text=; did you mean",
        ),
        ({"a.jsonl": '{"text": "\\ud800"}'}, {}, r"line 1 holds half a character at place 0"),
        ({"a.jsonl": lines({"text": "a", "label": True})}, {}, r"line 1: the label is True: give a word, or a whole"),
        ({"a.jsonl": lines({"text": "a", "label": -1})}, {}, r"line 1: the label is -1, out of range"),
        ({"a.jsonl": lines({"text": "", "label": 0})}, {}, r"line 1: the text is empty"),
        (
            {"a.jsonl": lines({"text": "a", "label": 0}), "b.txt": "ab"},
            {},
            r"b\.txt has no label, but .* has a number",
        ),
        ({"a.jsonl": lines({"text": "ab", "by": None})}, {"client": "by"}, r"line 1: the client is None: give a word"),
        ({"a.jsonl": lines({"\x1b[2Jtxt\n": "ab"})}, {}, r"name the column as text=; did you mean '\[2Jtxt'\?$"),
        ({"a.txt": "x"}, {}, r"holds no text of two tokens or more, so there is nothing to guess"),
        ({"test/a.txt": "abc", "train/x.md": "no"}, {}, r"train holds no texts: put one file"),
        ({"a.md": "abc"}, {}, r"holds no texts: put one file \(\.txt, \.jsonl, \.parquet, \.arrow\) for each client"),
        ({"a.txt": "abc"}, {"length": 0}, r"length is 0; give a whole number of tokens"),
        ({"a.txt": "abc"}, {"tokenizer": 7}, r"tokenizer is 7; give a word"),
        ({"a.txt": "abc"}, {"tokenizer": "bites"}, r"tokenizer:bites: there is no folder"),
        ({"a.txt": "abc"}, {"lenght": 7}, r"data 'text' has no option 'lenght'; did you mean 'length'"),
        ({"state.json": "{}"}, {}, r"is a saved dataset: name the column that says whose a row is"),
    ],
)
def test_bad_input(tmp_path, files, options, says):
    with pytest.raises(DataError, match=says):
        load_dataset(put(tmp_path / "t", files), **options)


def test_a_large_length_is_refused_before_memory_is_taken(tmp_path):
    name = put(tmp_path / "t", {"a.jsonl": lines({"text": "ab"}) * 3000})
    with pytest.raises(DataError, match=r"3,000 sequences of 1,000,000 tokens are more than"):
        load_dataset(name, length=1_000_000)


@pytest.mark.parametrize(
    ("library", "files", "options"),
    [
        ("pyarrow", {"a.parquet": "x"}, {}),
        ("datasets", {"state.json": "{}"}, {"client": "who"}),
        ("tokenizers", {"a.txt": "abc", "tokenizer.json": "{}"}, {"tokenizer": "t"}),
        ("transformers", {"a.txt": "abc"}, {"tokenizer": "t"}),
    ],
)
def test_a_missing_library_is_named(tmp_path, monkeypatch, library, files, options):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"needs the library `{library}`: pip install 'sparing\[hf\]'"):
        load_dataset(put(tmp_path / "t", files), **options)


def test_a_study_needs_no_split_and_trains(tmp_path):
    text = "".join(chr(97 + i % 5) for i in range(400))
    task = {"data": {put(tmp_path / "t", {f"{i}.txt": text for i in range(4)}): {"length": 16}}}
    for model in ({"transformer": {"width": 16, "layers": 1}}, {"lstm": {"hidden": 16, "layers": 1}}):
        result = sparing.run(
            task | {"model": model}, rounds=1, sample=2, local=LOCAL, evaluate={"metrics": "perplexity"}
        )
        assert 1 < result.metric("perplexity")[-1] < 256


def test_a_classifier_looks_at_the_last_token_before_the_padding(tmp_path):
    """Only the last character tells the class."""
    rows = [{"text": "x" * (1 + i % 7) + "ab"[i % 2], "label": i % 2} for i in range(60)]
    task = {"data": {put(tmp_path / "t", {f"{i}.jsonl": lines(*rows) for i in range(3)}): {"length": 8}}}
    task["model"] = {"transformer": {"width": 16, "layers": 1, "heads": 2}}
    result = sparing.run(task, rounds=3, sample=3, seed=1, local={"epochs": 3, "batch": 8, "lr": 0.3})
    assert result.accuracy == 1.0


def test_the_mask_finds_the_last_place():
    from sparing.models import build_network

    offered = {"vocabulary": 20, "per_token": False}
    for name in ("transformer", "lstm"):
        torch.manual_seed(0)
        net = build_network({name: {"layers": 1}}, (6,), 3, offered)
        x, mask = torch.randint(20, (2, 6)), torch.tensor([[1, 1, 1, 0, 0, 0], [1] * 6])
        out = net(input_ids=x, attention_mask=mask)
        assert out.shape == (2, 3)
        changed = x.clone()
        changed[0, 3:] = 7
        torch.testing.assert_close(net(input_ids=changed, attention_mask=mask), out)
        torch.testing.assert_close(net(x[:1, :3]), out[:1])
