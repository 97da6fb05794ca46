"""Files made to do harm: each is refused in one sentence, before it takes more than it is worth."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
import sklearn.datasets  # noqa: F401  (before any memory is traced)
import torch
from formats import cifar_batch, cifar_records, idx_bytes, random_images, write, write_leaf, write_mnist, write_pfllib
from PIL import Image

from sparing.core.errors import DataError
from sparing.data import load_dataset
from sparing.data.files import pickles, unpacking
from sparing.data.sets import cifar

LIMIT = unpacking._FREE_BYTES


def refused(name, words, **options):
    """Loading fails with one sentence, and takes little."""
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=words) as error:
            load_dataset(name, **options)
        assert tracemalloc.get_traced_memory()[1] < 4 * LIMIT
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2000


class Pointers:
    """An array of objects on bytes of the file's choice."""

    def __reduce__(self):
        return np.ndarray, ((64,), np.dtype("O"), b"\x41" * 512)


ENCODE = b"c_codecs\nencode\nh\0U\6latin1\x86R"
PICKLES = {
    "it calls something that is no function": pickle.dumps({"data": Pointers()}, 2),
    "it numbers a value 268,435,455": b"\x80\x02}r\xff\xff\xff\x0f.",
    "it holds the instruction b'i'": b"(ios\nsystem\n.",
    "it holds the instruction b'\\\\x81'": b"\x80\x02cnumpy\nndarray\nK\1\x85\x81.",
    "one list, tuple, dict or array in two places": b"\x80\x02]q\0(" + b"h\0" * 9 + b"e.",
    "it uses the same bytes again and again": b"\x80\x02X\0\0\1\0" + b"a" * 65536 + b"q\0](" + ENCODE * 99 + b"e.",
    "it holds a number of 2,147,483,647 bytes": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "it is cut short": b"\x80\x02B\xff\xff\xff\xff.",
    "it fills something that is no dict": b"\x80\x02)" + b"\x85" * 3_000 + b"K\0K\0s.",
    "has a dict whose keys are no text": b"\x80\x02}NN" + b"s.",
    "it ends before its values are complete": pickle.dumps(np.arange(3), 2)[:-2] + b".",
    "array of Python objects": pickle.dumps(np.array([None, 1]), 2),
    "are neither numbers nor text": pickle.dumps({"data": np.zeros(2, "V8")}, 2),
    r"its shape \(3,\) takes 3 bytes": pickle.dumps(np.arange(2, dtype=np.uint8), 4).replace(b"K\2\x85", b"K\3\x85"),
    r"labels of type str": pickle.dumps({"coarse_labels": ["a" * 9999, "b"], "fine_labels": [0, 0], "data": 0}),
}


def test_a_pickle_of_too_many_lists(here, monkeypatch):
    monkeypatch.setattr(pickles, "_MOST_CONTAINERS", 1000)
    for name in ("train", "test"):
        write(here / "cifar-100-python" / name, b"\x80\x02" + b"]" * 1001 + b".")
    refused("cifar100", "it holds more than 1,000 lists, tuples and dicts", check=False)


@pytest.mark.parametrize("sentence", PICKLES)
def test_pickles(here, sentence):
    for name in ("train", "test"):
        write(here / "cifar-100-python" / name, PICKLES[sentence])
    refused("cifar100", f"train.*{sentence}", check=False)


def test_a_known_checksum_is_compared_before_anything_is_parsed(here, monkeypatch):
    monkeypatch.setattr(cifar, "unpickle", None)
    for name in ("train", "test"):
        write(here / "cifar-100-python" / name, cifar_batch(cifar_records(3, 2), ("coarse_labels", "fine_labels")))
    refused("cifar100", "train is not the official cifar100/train: its MD5 is")
    write_mnist(here / "mnist")
    path = here / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(16 + 60_000 * 784), 0))  # no idx file, but as long as the official one
    refused("mnist", "is not the official mnist/train-images-idx3-ubyte: its SHA-256 is")


def bomb(head, megabytes):
    return gzip.compress(head, mtime=0) + gzip.compress(bytes(1 << 20), mtime=0) * megabytes


def test_a_small_gz_that_holds_3_gb(here):
    write_mnist(here / "mnist")
    path = here / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(bomb(bytes([0, 0, 8, 3]) + struct.pack(">3I", 3 << 20, 32, 32), 3 << 10))
    assert path.stat().st_size < 4e6
    words = (
        r"is 3,\d{3},\d{3} bytes but holds more than 9\d,\d{3},\d{3}, the most that is unpacked .*: unpack it by hand"
    )
    refused("mnist", words, check=False)


def test_an_archive_that_never_ends_and_one_of_nothing_but_a_promise(here):
    (here / "cifar-10-binary.tar.gz").write_bytes(bomb(b"", 64))
    refused("cifar10", "cifar-10-binary.tar.gz lacks data_batch_1.bin", check=False)  # zeros end a tar archive
    member = tarfile.TarInfo("a")
    member.size = 1 << 30
    (here / "cifar-10-binary.tar.gz").write_bytes(bomb(member.tobuf(), 64))
    refused("cifar10", "cifar-10-binary.tar.gz is .* bytes but holds more than", check=False)
    with tarfile.open(here / "cifar-10-binary.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("data_batch_1.bin")
        member.pax_headers = {"GNU.sparse.size": "4000000000", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,0"}
        archive.addfile(member, io.BytesIO())
    refused("cifar10", "data_batch_1.bin of .* is a sparse file: pack it with tar again", check=False)


@pytest.mark.parametrize(("ending", "pack"), [("json.xz", lzma.compress), ("bz2", bz2.compress)], ids=["xz", "bz2"])
def test_other_packings(here, ending, pack, monkeypatch):
    monkeypatch.setattr(unpacking, "_FREE_BYTES", 1 << 20)
    path = here / ("shakespeare_roles.json.xz" if ending == "json.xz" else "usps/usps.bz2")
    write(path, pack(bytes(2 << 20)))
    if ending == "bz2":
        write(here / "usps" / "usps.t.bz2", pack(b"1 1:0\n"))
        write_mnist(here / "mnist")
        np.savez(here / "mnist_m_sub.npz", x=random_images(1, (28, 28, 3)), y=[3], is_test=[0])
    refused("shakespeare" if ending == "json.xz" else "digit-domains", f"{path.name} is .* bytes but holds more than")


def test_overflowing_idx(here):
    write_mnist(here / "mnist", ending="")
    write(here / "mnist" / "train-images-idx3-ubyte", bytes([0, 0, 8, 3]) + struct.pack(">3I", 1 << 31, 1 << 31, 4))
    refused(
        "mnist", "wrong-sized: its header says .* takes 18,446,744,073,709,551,616 bytes, but 0 follow", check=False
    )
    write(here / "mnist" / "train-images-idx3-ubyte", idx_bytes(random_images(6).astype(np.int32)))
    refused("mnist", "is another file than its name says: its values are of type int32", check=False)


def zipped(method=zipfile.ZIP_DEFLATED, **files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(f"{name}.npy", data)
    return out.getvalue()


def npy(array):
    np.save(out := io.BytesIO(), array)
    return out.getvalue()


Y = npy(np.array([0, 1]))
ZEROS = npy(np.zeros((40 << 20, 1), np.int8))


def encrypted(data):
    return data.replace(b"PK\x03\x04\x14\0\0", b"PK\x03\x04\x14\0\1").replace(b"\x14\x03\x14\0\0", b"\x14\x03\x14\0\1")


def claiming(data, size):
    """An archive whose index says that its first file is so large."""
    at = data.index(b"PK\x01\x02") + 24
    return data[:at] + size.to_bytes(4, "little") + data[at + 4 :]


NPZ = {
    "0.npz: x.npy is encrypted: save it without a password": lambda: encrypted(zipped(x=npy(np.zeros((2, 3))), y=Y)),
    "bytes but holds more than 34,": lambda: zipped(x=ZEROS, y=Y),
    "x.npy is damaged": lambda: claiming(zipped(x=ZEROS, y=Y), 200),
    r"\(x.npy is damaged\)": lambda: claiming(zipped(zipfile.ZIP_LZMA, x=npy(np.zeros((2, 3))), y=Y), 99),
    r"its shape \(900000000, 3\) takes": lambda: zipped(
        x=npy(np.zeros((2, 3))).replace(b"(2, 3)", b"(900000000, 3)"), y=Y
    ),
    r"its shape is \(900000000, 0\)": lambda: zipped(
        x=npy(np.zeros((0, 3))).replace(b"(0, 3)", b"(900000000, 0)"), y=Y
    ),
    "its header is {'descr': print": lambda: zipped(x=npy(X).replace(b"'<f8', ", b"print, "), y=Y),
    "it starts with .*, which is no npy file": lambda: zipped(x=b"no", y=Y),
    "number that is no character": lambda: zipped(x=npy(np.array(["a"])).replace(b"a\0\0\0", b"\xff" * 4), y=Y),
    "own has 1,000,000,000,000,001 classes": lambda: zipped(x=npy(np.zeros((2, 3))), y=npy(np.array([0, 10**15]))),
}
X = np.zeros((2, 3))


@pytest.mark.parametrize("sentence", NPZ)
def test_npz(here, sentence):
    write(here / "own" / "0.npz", NPZ[sentence]())
    refused("npz:own", sentence)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_every_way_to_pack_an_npz_is_read(here, method):
    x = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    write(here / "own" / "0.npz", zipped(method, x=npy(x), y=Y))
    assert load_dataset("npz:own").x.tolist() == x.tolist()


def png(width, height):
    body = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", body), (b"IDAT", zlib.compress(bytes(99))), (b"IEND", b"")]
    parts = [struct.pack(">I", len(b)) + kind + b + struct.pack(">I", zlib.crc32(kind + b)) for kind, b in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("size", [(13_000, 13_000), (50_000_001, 1)])
def test_pictures_of_too_many_pixels(here, size):
    write(here / "photos" / "a" / "cat" / "1.png", png(*size))
    words = f"1.png has {size[0]:,} x {size[1]:,} pixels; a picture may have 50,000,000: make it smaller"
    refused("folder:photos", words)


def test_pictures_that_pillow_itself_finds_too_large_or_that_are_of_another_kind(here):
    path = here / "photos" / "a" / "cat" / "1.png"
    write(path, png(20_000, 20_000))
    refused("folder:photos", r"1.png is too large: Image size \(400000000 pixels\)")
    write(path, b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xfe\x3f\0\xfe\x3f\0" + bytes(9))
    refused("folder:photos", "1.png has 16,383 x 16,383 pixels")
    Image.new("RGB", (4, 4)).save(path, "EPS")  # for which Pillow would start Ghostscript
    refused("folder:photos", "1.png is not a picture that Pillow can read")


@pytest.mark.parametrize("lossless", [True, False])
def test_the_size_of_a_webp_is_known_before_it_is_opened(here, lossless):
    from sparing.data.files.images import _webp_size

    Image.new("RGB", (300, 17)).save(out := io.BytesIO(), "WEBP", lossless=lossless)
    assert _webp_size(out.getvalue()) == (300, 17)
    Image.new("RGBA", (300, 17), (1, 2, 3, 4)).save(out := io.BytesIO(), "WEBP", lossless=lossless)
    assert _webp_size(out.getvalue()) == (300, 17)


def test_leaf(here):
    good = {"x": [[0.0] * 784] * 2, "y": [0, 1]}
    write_leaf(here / "femnist", [{"a": good}], [{"a": good}])
    path = next((here / "femnist" / "train").iterdir())
    held = json.loads(path.read_text())
    for changed, words in (
        ({"users": ["a"] * 9999}, "its users are no list of different names"),
        ({"user_data": {"a": {"x": [[0.0] * 784] * 2, "y": ["a" * 99_999, "b"]}}}, "labels of type str: give numbers"),
        ({"user_data": {"a": {"x": 3, "y": 4}}}, "has no lists x and y"),
        ({"user_data": {"a": {"x": [{}], "y": [0]}}}, "images of mixed shapes"),
        ({"users": []}, "train.* holds no samples|mixed"),
    ):
        path.write_text(json.dumps(held | changed))
        if changed == {"users": []}:
            assert len(load_dataset("femnist")) == 2
        else:
            refused("femnist", words)
    path.write_text("[" * 100_000)
    refused("femnist", "is cut short or no json file of LEAF")


def test_pfllib_that_promises_many_clients(here):
    half = (np.zeros((1, 3), np.float32), [0])
    write_pfllib(here / "P", [(half, half)], config={"num_clients": 10**12, "num_classes": 3})
    refused("pfllib:P", "holds 1 npz files but config.json says 1000000000000 clients")
    write_pfllib(here / "P", [(half, half)], config={"num_clients": float("inf"), "num_classes": 3})
    refused("pfllib:P", "has no readable config.json")


@pytest.mark.parametrize("new", [True, False])
def test_tensors(here, new):
    write_mnist(here / "mnist")
    np.savez(here / "usps.npz", x_train=random_images(2, (16, 16)), y_train=[0, 9], x_test=random_images(1), y_test=[1])
    images, labels = torch.from_numpy(random_images(3, (28, 28, 3))), torch.tensor([3, 4, 5])

    def saved(*pair):
        for half in ("train", "test"):
            path = here / "mnist-m" / f"mnist_m_{half}.pt"
            path.parent.mkdir(exist_ok=True)
            torch.save(pair, path, _use_new_zipfile_serialization=new)

    saved(images[1:], labels[1:])
    assert torch.equal(load_dataset("digit-domains", side=28).x[-2:], images[1:].movedim(-1, 1))
    saved(images[:1].expand(10**9, -1, -1, -1), labels)
    refused("digit-domains", "not a pair of tensors .it holds a tensor whose values are not in order")
    saved(images, labels, labels)
    refused("digit-domains", r"is not a pair of tensors: save \(images, labels\)")
    saved(images, PICKLES)
    refused("digit-domains", r"is not a pair of tensors")


def test_names_that_only_look_like_numbers(here):
    for name in ("²", "7" * 240, "٣"):
        write(here / "own" / f"{name}.npz", zipped(x=npy(X), y=Y))
    assert load_dataset("npz:own").names["client"] == ["٣", "7" * 240, "²"]
