"""Clients as npz files: anyone's, and PFLlib's."""

import pickle
import zipfile

import numpy as np
import pytest
import torch
from formats import random_images, write_pfllib

from sparing.core.errors import DataError
from sparing.data import load_dataset
from sparing.data.files.pickles import unpickle


def write_clients(folder, *clients):
    folder.mkdir(exist_ok=True)
    for i, (x, y) in enumerate(clients):
        np.savez(folder / f"client{i * 9}.npz", x=x, y=y)


def test_one_file_per_client(here):
    write_clients(here / "own", (np.ones((2, 3)), [0, 1]), (np.zeros((1, 3)), [2.0]), (np.full((1, 3), 2), [0]))
    np.savez(here / "own" / "client18.npz", x=np.full((1, 3), 2.0), y=[0])
    data = load_dataset("npz:own")
    assert (data.x.dtype, data.x[:, 0].tolist(), data.y.tolist()) == (torch.float32, [1, 1, 0, 2], [0, 1, 2, 0])
    assert (data.groups["client"].tolist(), data.names["client"]) == ([0, 0, 1, 2], ["client0", "client9", "client18"])
    assert (data.classes, data.official, data.name) == (3, None, "own")
    assert load_dataset("npz:own", classes=5).classes == 5


@pytest.mark.parametrize(
    ("shape", "wanted"), [((2, 6, 6), (2, 1, 6, 6)), ((2, 6, 6, 3), (2, 3, 6, 6)), ((2, 3, 6, 6),) * 2]
)
def test_images_get_their_channels_first(here, shape, wanted):
    x = random_images(2, shape[1:])
    write_clients(here / "own", (x, [0, 1]))
    data = load_dataset("npz:own")
    assert (tuple(data.x.shape), data.x.dtype) == (wanted, torch.uint8)
    assert int(data.x.sum()) == int(x.sum(dtype=int))


X = np.zeros((2, 3))
BAD = {
    r"mixed shapes: .*client9.npz has \(4,\) but .*client0.npz has \(3,\): bring": [
        (X, [0, 1]),
        (np.zeros((1, 4)), [0]),
    ],
    r"mixed types: .*client9.npz has int64 but .*client0.npz has float32": [(X, [0, 1]), (X.astype(int), [0, 1])],
    "client0.npz has 2 samples but 3 labels": [(X, [0, 1, 2])],
    "client9.npz: the label of sample 1 is -1, out of range": [(X, [0, 1]), (X, [0, -1])],
    "client0.npz: the label of sample 0 is 7, out of range: number the classes 0, 1, ... to 4": [(X, [7, 0])],
    "client0.npz has labels of type float64 that are no class numbers: .*, or, where they are values, name a loader": [
        (X, [0.5, 1])
    ],
    r"client0.npz has labels of type <U1 that are no class numbers": [(X, ["a", "b"])],
    "client0.npz has x of type <U1": [(np.array([["a"]]), [0])],
    "own: sample 2 has a value that is not finite": [(X, [0, 1]), (X + np.inf, [0, 1])],
    "own holds no samples": [(X[:0], [])],
    "own holds no npz file: put one per client there": [],
    "client0.npz is cut short, damaged or no npz file of plain arrays": [(np.array([[{}], [None]]), [0, 1])],
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_npz(here, sentence):
    write_clients(here / "own", *BAD[sentence])
    with pytest.raises(DataError, match=sentence):
        load_dataset("npz:own", classes=5)


def test_an_array_is_missing(here):
    (here / "own").mkdir()
    np.savez(here / "own" / "a.npz", x=X)
    with pytest.raises(DataError, match=r"a.npz has no array 'y' \(it has x\)"):
        load_dataset("npz:own")


def clients():
    images = random_images(7, (1, 4, 4)).astype(np.float32) / 255
    return [
        ((images[:3], np.array([0, 1, 2])), (images[3:4], np.array([1]))),
        ((images[4:6], [1, 1]), (images[6:], [2])),
    ]


def test_pfllib(here):
    write_pfllib(here / "MNIST", clients())
    data = load_dataset("pfllib:MNIST")
    assert (data.x.shape, data.x.dtype, data.classes) == ((7, 1, 4, 4), torch.float32, 3)
    assert data.y.tolist() == [0, 1, 2, 1, 1, 1, 2]
    assert data.groups["client"].tolist() == [0, 0, 0, 1, 1, 0, 1]
    assert data.official.tolist() == [False] * 5 + [True] * 2
    whole = np.concatenate([half[0] for i in (0, 1) for half in (clients()[0][i], clients()[1][i])])
    assert np.array_equal(data.x.numpy(), whole)


class Evil:
    def __reduce__(self):
        return print, ("this must never be printed",)


def spoil(path, data):
    array = np.empty((), object)
    array[()] = data
    np.savez(path, data=array)


PFLLIB = {
    r"0.npz is not a pickle of plain arrays \(it asks for builtins.print": lambda root: spoil(
        root / "train/0.npz", Evil()
    ),
    "0.npz holds no dict with x and y": lambda root: spoil(root / "train/0.npz", [1, 2]),
    "test holds 1 npz files but config.json says 2 clients": lambda root: (root / "test/1.npz").unlink(),
    "MNIST has no readable config.json with num_classes": lambda root: (root / "config.json").write_text("{}"),
    "1.npz is cut short, damaged or has no 'data'": lambda root: (root / "train/1.npz").write_bytes(b"PK"),
    "1.npz: the label of sample 0 is 3, out of range": lambda root: spoil(
        root / "test/1.npz", {"x": np.zeros((1, 1, 4, 4), np.float32), "y": [3]}
    ),
    r"mixed shapes: .*1.npz has \(9,\)": lambda root: spoil(
        root / "test/1.npz", {"x": np.zeros((1, 9), np.float32), "y": [0]}
    ),
}


@pytest.mark.parametrize("sentence", PFLLIB)
def test_bad_pfllib(here, sentence, capsys):
    write_pfllib(here / "MNIST", clients())
    PFLLIB[sentence](here / "MNIST")
    with pytest.raises(DataError, match=sentence):
        load_dataset("pfllib:MNIST")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_pickles_of_any_age(protocol):
    held = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": [1, 2], "b": b"\xff\0", "n": np.int64(3)}
    seen = unpickle(pickle.dumps(held, protocol), "here")
    assert np.array_equal(seen["x"], held["x"])
    assert (seen["y"], seen["b"], seen["n"]) == ([1, 2], b"\xff\0", 3)


def test_an_archive_without_the_array(here):
    write_pfllib(here / "MNIST", clients())
    with zipfile.ZipFile(here / "MNIST" / "train" / "0.npz", "w") as archive:
        archive.writestr("other.npy", b"")
    with pytest.raises(DataError, match=r"0.npz is cut short, damaged or has no 'data'"):
        load_dataset("pfllib:MNIST")
