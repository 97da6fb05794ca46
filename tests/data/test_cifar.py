"""CIFAR in all its wrappings: archives, binary files, the Python version, mosaics."""

import hashlib
import pickle

import numpy as np
import pytest
from formats import cifar_batch, cifar_records, random_images, write, write_tar
from PIL import Image

from sparing.core.errors import DataError
from sparing.data import load_dataset
from sparing.data.files import checksums
from sparing.data.sets.cifar import _CIFAR10, _CIFAR100

KINDS = {"cifar10": _CIFAR10, "cifar100": _CIFAR100}


def records(kind):
    return {file: cifar_records(3, len(kind.keys), seed) for seed, file in enumerate(kind.files)}


def archive(here, kind, held):
    members = {f"{kind.binary}/{file}": rows.tobytes() for file, rows in held.items()}
    write_tar(here / kind.archive.format("binary"), {f"{kind.binary}/readme.html": b"hello", **members})


def bins(here, kind, held):
    for file, rows in held.items():
        write(here / kind.name / kind.binary / file, rows.tobytes())


def python_archive(here, kind, held):
    members = {f"{kind.python}/{file[:-4]}": cifar_batch(rows, kind.keys) for file, rows in held.items()}
    write_tar(here / kind.name / kind.archive.format("python"), members)


def pickles(here, kind, held):
    for file, rows in held.items():
        write(here / kind.python / file[:-4], cifar_batch(rows, kind.keys))


@pytest.mark.parametrize("wrap", [archive, bins, python_archive, pickles])
@pytest.mark.parametrize("name", KINDS)
def test_round_trip(here, name, wrap, monkeypatch):
    kind, held = KINDS[name], records(KINDS[name])
    wrap(here, kind, held)
    data = load_dataset(name, check=False)
    rows = np.concatenate(list(held.values()))
    assert np.array_equal(data.x.numpy(), rows[:, -3072:].reshape(-1, 3, 32, 32))
    assert data.y.tolist() == rows[:, len(kind.keys) - 1].tolist()
    assert data.official.sum() == 3
    assert data.official[-3:].all()
    assert len(data.names["class"]) == data.classes == {"cifar10": 10, "cifar100": 100}[name]
    if name == "cifar100":
        assert data.groups["superclass"].tolist() == rows[:, 0].tolist()
        assert len(data.names["superclass"]) == 20
    pickled = wrap in (python_archive, pickles)
    sentence = r"is not the official \S*: its MD5 is" if pickled else r"wrong-sized: it holds 3 samples, the official"
    with pytest.raises(DataError, match=f"(train|data_batch_1).* {sentence}"):
        load_dataset(name)
    for file, rows in held.items():
        batch = cifar_batch(rows, kind.keys)
        monkeypatch.setitem(kind.files, file, 3)
        monkeypatch.setitem(checksums._SHA256, f"{name}/{file}", hashlib.sha256(rows.tobytes()).hexdigest())
        monkeypatch.setitem(checksums._MD5, f"{name}/{file[:-4]}", hashlib.md5(batch).hexdigest())
    assert len(load_dataset(name)) == len(data)


def mosaic(tiles, columns):
    rows = tiles.reshape(-1, columns, 3, 32, 32).transpose(0, 3, 1, 4, 2)
    return Image.fromarray(np.ascontiguousarray(rows).reshape(-1, columns * 32, 3))


def test_mosaics(here):
    x = random_images(12, (3, 32, 32))
    fine, coarse = np.arange(12) * 8, np.arange(12)
    for name, span in (("train_a", slice(0, 4)), ("train_b", slice(4, 8)), ("test", slice(8, 12))):
        mosaic(x[span], 2).save(here / f"cifar100_{name}.webp", lossless=True)
    labels = {"fine_train": fine[:8], "coarse_train": coarse[:8], "fine_test": fine[8:], "coarse_test": coarse[8:]}
    np.savez(here / "cifar100_labels.npz", **labels)
    data = load_dataset("cifar100", check=False)
    assert np.array_equal(data.x.numpy(), x)
    assert data.y.tolist() == fine.tolist()
    assert data.groups["superclass"].tolist() == coarse.tolist()
    Image.new("RGB", (64, 65)).save(here / "cifar100_test.webp", lossless=True)
    with pytest.raises(DataError, match=r"is wrong-sized: 64x65 pixels are no whole number of 32x32 tiles"):
        load_dataset("cifar100", check=False)
    Image.new("RGB", (64, 32)).save(here / "cifar100_test.webp", lossless=True)
    with pytest.raises(DataError, match=r"cifar100_test.webp is wrong-sized: 2 tiles for 4 labels"):
        load_dataset("cifar100", check=False)


class Evil:
    def __reduce__(self):
        return print, ("this must never be printed",)


def spoiled_pickle(here, held):
    pickles(here, _CIFAR100, held)
    write(here / "cifar-100-python" / "train", pickle.dumps({"data": Evil()}))


def wrong_batch(here, held):
    pickles(here, _CIFAR100, held)
    write(here / "cifar-100-python" / "train", pickle.dumps({"data": np.zeros((2, 3072), np.uint8)}))


def cut_tar(here, held):
    archive(here, _CIFAR100, held)
    path = here / "cifar-100-binary.tar.gz"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def odd_bin(here, held):
    bins(here, _CIFAR100, held | {"test.bin": cifar_records(3, 2)[:, :-1]})


def short_tar(here, held):
    archive(here, _CIFAR100, {"train.bin": held["train.bin"]})


def big_label(at):
    def spoil(here, held):
        held["test.bin"][1, at] = 200
        bins(here, _CIFAR100, held)

    return spoil


SPOILED = {
    r"train is not a pickle of plain arrays \(it asks for builtins.print, which is no plain data\)": spoiled_pickle,
    "train is no batch of cifar100 ": wrong_batch,
    "cifar-100-binary.tar.gz is cut short or damaged": cut_tar,
    "test.bin is wrong-sized: 9,219 bytes are no whole number of 3074-byte records": odd_bin,
    "cifar-100-binary.tar.gz lacks test.bin": short_tar,
    "cifar100: the label of sample 4 is 200, out of range": big_label(1),
    "superclass 200, out of range: there are 20": big_label(0),
}


@pytest.mark.parametrize("sentence", SPOILED)
def test_bad_input(here, sentence, capsys):
    SPOILED[sentence](here, records(_CIFAR100))
    with pytest.raises(DataError, match=sentence) as error:
        load_dataset("cifar100", check=False)
    assert "; fetch it again with: curl" in str(error.value)
    assert capsys.readouterr().out == ""
