"""FEMNIST and Shakespeare: LEAF's json files, and speeches by role."""

import json
import lzma

import numpy as np
import pytest
import torch
from formats import random_images, write_leaf

from sparing.core.errors import DataError
from sparing.data import load_dataset
from sparing.data.tokenisers import CHARACTERS


def user(x, y):
    return {"x": (x.reshape(len(x), -1) / 255).tolist(), "y": list(y)}


def test_femnist(here):
    x = random_images(6)
    train = [{"f10": user(x[:2], [0, 61])}, {"f9": user(x[2:4], [3, 4])}]
    write_leaf(here / "femnist", train, [{"f10": user(x[4:5], [1]), "f9": user(x[5:], [2]), "f8": {"x": [], "y": []}}])
    data = load_dataset("femnist")
    assert np.array_equal(data.x[:, 0].numpy(), x)
    assert data.x.dtype == torch.uint8
    assert (data.y.tolist(), data.classes) == ([0, 61, 3, 4, 1, 2], 62)
    assert data.official.tolist() == [False] * 4 + [True] * 2
    assert (data.groups["writer"].tolist(), data.names["writer"]) == ([1, 1, 0, 0, 1, 0], ["f9", "f10"])
    assert [data.names["class"][i] for i in (0, 10, 36)] == ["0", "A", "a"]


def pieces(text, length=80):
    n = len(text) - length
    return {"x": [text[i : i + length] for i in range(n)], "y": [text[i + length] for i in range(n)]}


def said(row):
    return "".join(CHARACTERS[i] for i in row.tolist())


TEXT = "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer" * 2


def test_shakespeare_of_leaf(here):
    write_leaf(here / "shakespeare" / "data", [{"HAMLET": pieces(TEXT[:83])}], [{"HAMLET": pieces(TEXT[:81])}])
    data = load_dataset("shakespeare")
    assert (data.x.shape, data.y.shape, data.x.dtype, data.y.dtype) == ((4, 80), (4, 80), torch.int64, torch.int64)
    assert said(data.x[1]) == TEXT[1:81]
    assert said(data.y[1]) == TEXT[2:82]
    assert data.official.tolist() == [False] * 3 + [True]
    with pytest.raises(DataError, match=r"user HAMLET, has a piece of 80 characters among those of 20"):
        load_dataset("shakespeare", length=20)


def test_shakespeare_by_speeches(here):
    roles = {"hamlet|HAMLET": [TEXT, "Ay, thêre's the rub;"], "hamlet|GHOST": ["Mark me."], "hamlet|FIRST": ["x" * 81]}
    with lzma.open(here / "shakespeare_roles.json.xz", "wt", encoding="utf-8") as file:
        json.dump(roles, file)
    data = load_dataset("shakespeare")
    whole = TEXT + "\nAy, th\N{REPLACEMENT CHARACTER}re's the rub;"
    assert data.names["role"] == ["hamlet|FIRST", "hamlet|HAMLET"]
    assert data.groups["role"].tolist() == [1, 1, 0]
    assert said(data.x[0]) + said(data.x[1]) == whole[:160]
    assert said(data.y[0]) + said(data.y[1]) == whole[1:161]
    assert (data.classes, data.official) == (97, None)
    assert load_dataset("shakespeare", length=5).x.shape == ((len(whole) - 1) // 5 + 16 + 1, 5)
    with pytest.raises(DataError, match=r"has no role with more than 999 characters"):
        load_dataset("shakespeare", length=999)


def cut_json(folder):
    path = next((folder / "train").iterdir())
    path.write_text(path.read_text()[:-9])


SPOILED = {
    "train holds no json file of LEAF": lambda folder: [path.unlink() for path in (folder / "train").iterdir()],
    "train_9.json is cut short or no json file of LEAF": cut_json,
    "user a, has 2 samples but 1 labels": lambda folder: write_leaf(folder, [{"a": user(random_images(2), [1])}], []),
    r"user a, has samples of shape \(16,\): each must be 784": lambda folder: write_leaf(
        folder, [{"a": user(random_images(1, (4, 4)), [1])}], []
    ),
    "user a, has images of mixed shapes": lambda folder: write_leaf(
        folder, [{"a": {"x": [[0.0] * 784, [0.0] * 3], "y": [0, 1]}}], []
    ),
    "user a,: the label of sample 1 is 62, out of range": lambda folder: write_leaf(
        folder, [{"a": user(random_images(2), [1, 62])}], []
    ),
}


@pytest.mark.parametrize("sentence", SPOILED)
def test_bad_input(here, sentence):
    write_leaf(here / "femnist", [{"a": user(random_images(1), [0])}], [{"a": user(random_images(1), [0])}])
    SPOILED[sentence](here / "femnist")
    with pytest.raises(DataError, match=sentence) as error:
        load_dataset("femnist")
    assert "fetch it again with: git clone https://github.com/TalwalkarLab/leaf" in str(error.value)


def test_truncated_xz(here):
    path = here / "shakespeare_roles.json.xz"
    path.write_bytes(lzma.compress(json.dumps({"a": [TEXT]}).encode())[:-20])
    with pytest.raises(DataError, match=r"shakespeare_roles.json.xz is cut short or damaged"):
        load_dataset("shakespeare")
