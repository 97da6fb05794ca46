"""MNIST, Fashion-MNIST and EMNIST from idx files, packed or not, whole or not."""

import hashlib

import numpy as np
import pytest
import torch
from formats import idx_bytes, random_images, write, write_mnist

from sparing.core.errors import DataError
from sparing.data import load_dataset
from sparing.data.files import checksums
from sparing.data.sets import mnist


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fashion-mnist", "fashion-mnist")],
)
def test_round_trip(here, name, folder, ending):
    x, y = write_mnist(here / folder, ending=ending)
    data = load_dataset(name, check=False)
    assert (data.x.dtype, data.y.dtype, data.name, data.classes) == (torch.uint8, torch.int64, name, 10)
    assert np.array_equal(data.x[:, 0].numpy(), x)
    assert data.y.tolist() == y.tolist()
    assert data.official is not None
    assert data.official.tolist() == [False] * 6 + [True] * 4
    assert len(data.names["class"]) == 10


def test_mnist_from_one_npz(here):
    x, y = random_images(5), np.arange(5, dtype=np.uint8)
    np.savez(here / "mnist.npz", x_train=x[:3], y_train=y[:3], x_test=x[3:], y_test=y[3:])
    data = load_dataset("mnist", check=False)
    assert np.array_equal(data.x[:, 0].numpy(), x)
    with pytest.raises(DataError, match=r"x_train of .*mnist.npz is wrong-sized: it holds 3 samples, the official one"):
        load_dataset("mnist")


def test_fashion_is_found_in_debians_folder(tmp_path, monkeypatch):
    write_mnist(tmp_path / "debian")
    monkeypatch.setattr(
        mnist, "_FASHION_FORMS", [mnist._FASHION_FORMS[0]._replace(folders=("fashion-mnist", str(tmp_path / "debian")))]
    )
    assert mnist._DEBIAN_FOLDER == "/usr/share/datasets/fashion-mnist"
    assert len(load_dataset("fashion-mnist", check=False)) == 10


def test_the_official_content_is_known_by_its_sha256(here, monkeypatch):
    write_mnist(here / "mnist")
    monkeypatch.setattr(mnist, "_OFFICIAL_SIZES", (6, 6, 4, 4))
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte.gz is not the official mnist/train-images-idx3-ubyte: "
    ):
        load_dataset("mnist")
    for name in mnist.MNIST_NAMES:
        seen = hashlib.sha256(mnist.read_unpacked(here / "mnist" / f"{name}.gz")).hexdigest()
        monkeypatch.setitem(checksums._SHA256, f"mnist/{name}", seen)
    assert len(load_dataset("mnist")) == 10


@pytest.mark.parametrize("split", ["balanced", "letters", "byclass"])
def test_emnist_is_turned_upright(here, split):
    first = int(split == "letters")
    x, y = random_images(5), np.array([0, 1, 2, 25, 3], np.uint8) + first
    for half, span in (("train", slice(0, 3)), ("test", slice(3, 5))):
        name = f"emnist-{split}-{half}"
        write(here / "emnist" / f"{name}-images-idx3-ubyte.gz", idx_bytes(x[span].swapaxes(1, 2).copy()))
        write(here / "emnist" / f"{name}-labels-idx1-ubyte.gz", idx_bytes(y[span].astype(np.uint8)))
    data = load_dataset("emnist", split=split, check=False)
    assert np.array_equal(data.x[:, 0].numpy(), x)
    assert data.y.tolist() == [0, 1, 2, 25, 3]
    assert data.classes == len(data.names["class"]) == {"balanced": 47, "letters": 26, "byclass": 62}[split]
    assert data.names["class"][10] == ("k" if split == "letters" else "A")
    with pytest.raises(DataError, match=r"wrong-sized: it holds 3 samples.*; fetch it again with: curl .*gzip.zip"):
        load_dataset("emnist", split=split)


def cut_gz(folder):
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-50])


def damage_gz(folder):
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"<html>404</html>")


def drop(folder):
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()


def put(name, array):
    return lambda folder: write(folder / f"{name}.gz", array if isinstance(array, bytes) else idx_bytes(array))


FEW = np.zeros(5, np.uint8)
SPOILED = {
    "train-images-idx3-ubyte.gz is cut short or damaged": cut_gz,
    r"train-images-idx3-ubyte.gz is cut short or damaged \(Not a gzipped file": damage_gz,
    r"mnist: .*/mnist lacks t10k-labels-idx1-ubyte\[.gz\]; fetch it with: curl": drop,
    "train-images-idx3-ubyte.gz is not an idx file: it starts with 3c 68": put("train-images-idx3-ubyte", b"<html>"),
    r"is wrong-sized: its header says \(6, 28, 28\), which takes 4,704 bytes, but 4,000 follow": put(
        "train-images-idx3-ubyte", idx_bytes(random_images(6))[:4016]
    ),
    "train-images-idx3-ubyte.gz is another file than its name says: its header has 1 axes": put(
        "train-images-idx3-ubyte", FEW
    ),
    "train-images-idx3-ubyte.gz has 6 samples but 5 labels: each needs one": put("train-labels-idx1-ubyte", FEW),
    "train-images-idx3-ubyte.gz: the label of sample 2 is 11, out of range: number the classes 0, 1, ... to 9": put(
        "train-labels-idx1-ubyte", np.array([1, 2, 11, 4, 5, 6], np.uint8)
    ),
    r"mixed shapes: .*t10k-images-idx3-ubyte.gz has \(1, 20, 20\) but .*train-images.* has \(1, 28, 28\)": put(
        "t10k-images-idx3-ubyte", random_images(4, (20, 20))
    ),
}


@pytest.mark.parametrize("sentence", SPOILED)
def test_files_that_cannot_be_meant(here, sentence):
    write_mnist(here / "mnist")
    SPOILED[sentence](here / "mnist")
    with pytest.raises(DataError, match=sentence) as error:
        load_dataset("mnist", check=False)
    assert "fetch it " in str(error.value)
    assert "\n" not in str(error.value)


def test_a_shorter_file_than_the_official_one(here):
    write_mnist(here / "mnist")
    with pytest.raises(
        DataError, match=r"wrong-sized: it holds 6 samples, the official one 60,000 \(check=False takes"
    ):
        load_dataset("mnist")
