"""Small valid files in every format that sparing reads, and files made by hand to do harm.

A `Case` is a folder of files, one of which is to be damaged, and the call that reads them. `hostile` are files that
stand in the place of the one that a case damages.
"""

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fuzz_damage import (
    Damage,
    a_pickle,
    a_zip,
    any_bytes,
    either,
    gzipped,
    idx_header,
    in_torch,
    inside,
    json_value,
    npy_header,
    pickled_npy,
    png,
    png_chunks,
    tar_member,
    text,
    zipped,
)
from PIL import Image

from sparing.data import cache, load_dataset
from sparing.data.dataset import Dataset
from sparing.fleet.fleet import read_capacity, read_trace
from sparing.runs.study import load_study
from sparing.split.index_lists import read_index_lists


class Case(NamedTuple):
    reader: str
    files: dict[str, bytes]
    target: str  # the file that is damaged
    damage: Damage
    read: Callable[[Path], Any]  # given the folder


# The valid files.


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (3, 28, 28), dtype=np.uint8), np.array([0, 1, 2], np.uint8)


def idx(array: np.ndarray) -> bytes:
    code = {"uint8": 8, "int32": 12}[array.dtype.name]
    head = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array, allow_pickle=True)
    return out.getvalue()


def npz(**held: Any) -> bytes:
    return zipped({f"{name}.npy": npy(np.asarray(array)) for name, array in held.items()})


def batch(*keys: str, protocol: int = 2) -> bytes:
    x, y = arrays()
    held: dict[str, Any] = {key: y[:2].tolist() for key in keys}
    return pickle.dumps({**held, "data": np.resize(x, (2, 3072)), "filenames": ["a.png", "b.png"]}, protocol)


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def picture(kind: str, size: tuple[int, int] = (6, 5)) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, kind, **({"lossless": True} if kind == "WEBP" else {}))
    return out.getvalue()


def saved(pair: Any, new: bool) -> bytes:
    out = io.BytesIO()
    torch.save(pair, out, _use_new_zipfile_serialization=new)
    return out.getvalue()


def leaf(x: list[Any], y: list[Any]) -> bytes:
    return json.dumps({"users": ["a"], "num_samples": [len(y)], "user_data": {"a": {"x": x, "y": y}}}).encode()


def loading(name: str, **options: Any) -> Callable[[Path], Any]:
    return lambda folder: load_dataset(name, **options)


IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CIFAR10 = tuple(f"data_batch_{i}" for i in range(1, 6)) + ("test_batch",)
PICTURES = {"png": "PNG", "jpg": "JPEG", "gif": "GIF", "bmp": "BMP", "webp": "WEBP", "tiff": "TIFF", "ppm": "PPM"}
FEATURES = np.linspace(0, 1, 6, dtype=np.float32).reshape(2, 3)
STUDY = b"""task: {data: digits, clients: 20, split: {dirichlet: 0.3}, model: cnn}
method: [psfed, {topk: {ratio: 0.1}}, int8]
local: {epochs: 1, batch: 32, lr: 0.05}
fleet: {trace: phones.csv, links: {up: 1, down: 20}}
rounds: 20
sample: 0.5
"""


def mnist_files(ending: str = "") -> dict[str, bytes]:
    x, y = arrays()
    held = zip(IDX, [idx(x), idx(y), idx(x[:1]), idx(y[:1])], strict=True)
    return {f"mnist/{name}{ending}": gzipped(data) if ending else data for name, data in held}


def pickle_cases() -> Iterator[Case]:
    for protocol in (2, 4):
        held = {f"cifar-10-batches-py/{name}": batch("labels", protocol=protocol) for name in CIFAR10}
        yield Case("pickle", held, "cifar-10-batches-py/data_batch_1", a_pickle, loading("cifar10", check=False))
    held = {f"cifar-100-python/{name}": batch("coarse_labels", "fine_labels") for name in ("train", "test")}
    yield Case("pickle", held, "cifar-100-python/train", a_pickle, loading("cifar100", check=False))
    client = np.empty((), object)
    client[()] = {"x": FEATURES, "y": [0, 1]}
    held = {f"P/{half}/0.npz": zipped({"data.npy": npy(client)}) for half in ("train", "test")}
    held["P/config.json"] = b'{"num_clients": 1, "num_classes": 2}'
    yield Case("pickle", held, "P/train/0.npz", a_zip(pickled_npy), loading("pfllib:P"))
    yield Case("LEAF, json", held, "P/config.json", json_value, loading("pfllib:P"))


def npz_cases() -> Iterator[Case]:
    x, y = arrays()
    damage = a_zip(npy_header)
    own = {"own/0.npz": npz(x=FEATURES, y=[0, 1]), "own/1.npz": npz(x=FEATURES, y=[1, 0])}
    yield Case("npz", own, "own/0.npz", damage, loading("npz:own"))
    whole = npz(x_train=x, y_train=y, writer_train=[1, 1, 2], x_test=x[:1], y_test=y[:1], writer_test=[3])
    for name in ("mnist", "mnist-writers"):
        yield Case("npz", {"mnist_writers.npz": whole}, "mnist_writers.npz", damage, loading(name, check=False))
    office = npz(x=np.resize(x, (2, 4, 4, 3)), y=[0, 1], domain=[0, 1], classes=["a", "b"], domains=["c", "d"])
    name = "office_caltech10_32.npz"
    yield Case("npz", {name: office}, name, damage, loading("office-caltech10", side=8))
    lists = npz(train_0=[0, 1], train_1=[2], test_0=[3], test_1=[4])
    yield Case(
        "npz", {"lists.npz": lists}, "lists.npz", damage, lambda folder: read_index_lists(folder / "lists.npz", 5)
    )


def idx_cases() -> Iterator[Case]:
    damage = either(idx_header, any_bytes)
    for target in IDX[:2]:
        yield Case("idx", mnist_files(), f"mnist/{target}", damage, loading("mnist", check=False))
    rows, other = np.zeros((3, 8), np.int32), np.zeros((1, 8), np.int32)
    rows[:, 0], rows[:, 2] = [0, 1, 2], [5, 5, 6]
    train, test = (f"qmnist/qmnist-{half}-labels-idx2-int" for half in ("train", "test"))
    held = {**mnist_files(), train: idx(rows), test: idx(other)}
    yield Case("idx", held, train, damage, loading("mnist-writers", check=False))
    packed = inside(gzipped, gzip.decompress, idx_header)
    for target in IDX[:2]:
        yield Case("gz", mnist_files(".gz"), f"mnist/{target}.gz", packed, loading("mnist", check=False))


def tar_cases() -> Iterator[Case]:
    bins = tar({f"cifar-10-batches-bin/{name}.bin": bytes(3073) for name in CIFAR10})
    python = tar({f"cifar-10-batches-py/{name}": batch("labels") for name in CIFAR10})
    damage = inside(gzipped, gzip.decompress, either(tar_member, any_bytes))
    for kind, held in (("binary", bins), ("python", python)):
        name = f"cifar-10-{kind}.tar.gz"
        yield Case("gz", {name: gzipped(held)}, name, damage, loading("cifar10", check=False))


def picture_cases() -> Iterator[Case]:
    for ending, kind in PICTURES.items():
        held = {f"photos/a/cat/1.{ending}": picture(kind), "photos/a/dog/1.png": picture("PNG")}
        damage = either(png_chunks, png_chunks, any_bytes) if kind == "PNG" else any_bytes
        for _ in range(4 if kind == "PNG" else 1):
            reader = "PNG" if kind == "PNG" else "other pictures"
            yield Case(reader, held, f"photos/a/cat/1.{ending}", damage, loading("folder:photos", side=4))
    held = {f"cifar100_{name}.webp": picture("WEBP", (32, 32)) for name in ("train_a", "train_b", "test")}
    held["cifar100_labels.npz"] = npz(coarse_train=[0, 1], fine_train=[2, 3], coarse_test=[0], fine_test=[1])
    yield Case("other pictures", held, "cifar100_train_a.webp", any_bytes, loading("cifar100", check=False))
    yield Case("npz", held, "cifar100_labels.npz", a_zip(npy_header), loading("cifar100", check=False))


def text_cases() -> Iterator[Case]:
    trace = b"client,from,to\n0,1,3\n1,2,9\n0,5,6\n"
    capacity = b"client,rank,up,down,speed\n0,0.5,1,2,100\n1,1,3,4.5,50\n"
    for _ in range(2):
        yield Case("CSV", {"t.csv": trace}, "t.csv", text, lambda folder: read_trace(folder / "t.csv", 2).present(7, 2))
        yield Case("CSV", {"c.csv": capacity}, "c.csv", text, lambda folder: read_capacity(folder / "c.csv", 2))
        yield Case("YAML", {"study.yaml": STUDY}, "study.yaml", text, lambda folder: load_study(folder / "study.yaml"))
    image = [0.0] * 783 + [1.0]
    held = {"femnist/train/a.json": leaf([image, image], [0, 1]), "femnist/test/a.json": leaf([image], [2])}
    for target in held:
        yield Case("LEAF, json", held, target, json_value, loading("femnist"))
    held = {f"shakespeare/{half}/a.json": leaf(["to be, or"], ["n"]) for half in ("train", "test")}
    yield Case("LEAF, json", held, "shakespeare/train/a.json", json_value, loading("shakespeare", length=9))
    lists = {"lists.json": b'{"train": [[0, 1], [2]], "test": [[3], [4]]}'}
    yield Case("LEAF, json", lists, "lists.json", json_value, lambda folder: read_index_lists(folder / "lists.json", 5))
    said = lzma.compress(b'{"HAMLET": ["to be, or not to be"], "GHOST": ["mark me, mark me"]}')
    name, damage = "shakespeare_roles.json.xz", inside(lzma.compress, lzma.decompress, json_value)
    yield Case("xz, bz2", {name: said}, name, damage, loading("shakespeare", length=5))


def domain_cases() -> Iterator[Case]:
    usps = bz2.compress(b"1 " + b" ".join(b"%d:0.5" % i for i in range(1, 257)) + b"\n3 5:-1\n")
    pair = (torch.from_numpy(np.resize(arrays()[0], (2, 4, 4, 3))), torch.tensor([1, 2]))
    held = {**mnist_files(), "usps/usps.bz2": usps, "usps/usps.t.bz2": usps}
    damage = either(any_bytes, in_torch)
    for new in (True, False):
        held |= {f"mnist-m/mnist_m_{half}.pt": saved(pair, new) for half in ("train", "test")}
        own = a_zip(damage) if new else damage
        yield Case("torch", dict(held), "mnist-m/mnist_m_train.pt", own, loading("digit-domains", side=4))
    packed = inside(bz2.compress, bz2.decompress, text)
    yield Case("xz, bz2", held, "usps/usps.bz2", packed, loading("digit-domains", side=4))


def cache_cases() -> Iterator[Case]:
    """What sparing keeps itself of a dataset that it has decoded."""
    made = Dataset("a", torch.from_numpy(FEATURES.copy()), torch.tensor([0, 1]), 2)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "a" / "b"
        cache.write_cached(made, place, "asked")
        held = {f"kept/{file.name}": file.read_bytes() for file in place.iterdir()}
    for target, damage in (("about.json", json_value), ("0.npy", npy_header), ("1.npy", npy_header)):
        yield Case("cache", held, f"kept/{target}", damage, lambda folder: cache.open_cached(folder / "kept"))


def cases() -> list[Case]:
    kinds = (pickle_cases, npz_cases, idx_cases, tar_cases, picture_cases, text_cases, domain_cases, cache_cases)
    return [case for kind in kinds for case in kind()]


# Files made to do harm, by reader: (part of the target's name, content).


class Pointers:
    """What a pickle must not be able to make: an array of objects on bytes of its own choice."""

    def __reduce__(self) -> Any:
        return np.ndarray, ((64,), np.dtype("O"), b"\x41" * 512)


def bomb_of(head: bytes, megabytes: int) -> bytes:
    """A gz file of a thousandth of its content, which is zeros behind a head."""
    return gzipped(head) + gzip.compress(bytes(1 << 20), 9, mtime=0) * megabytes


def flat_png(width: int, height: int) -> bytes:
    packer, row = zlib.compressobj(9), bytes(width + 1)
    rows = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b""))


def lying_zip(data: bytes, claimed: int) -> bytes:
    """A zip archive whose index says that a file is smaller than what comes out of it."""
    out = bytearray(zipped({"x.npy": data, "y.npy": npy(np.array([0, 1]))}))
    for match in list(re.finditer(rb"PK\x01\x02", out))[:1]:
        out[match.start() + 24 : match.start() + 28] = claimed.to_bytes(4, "little")
    return bytes(out)


def zeros_npy(megabytes: int) -> dict[str, bytes]:
    zeros = np.zeros(megabytes << 20, np.int8)
    return {"x.npy": npy(zeros[:, None]), "y.npy": npy(zeros)}


def long_member() -> bytes:
    """The head of a file of 3 GB in a tar archive."""
    info = tarfile.TarInfo("data_batch_1.bin")
    info.size = 3 << 30
    return info.tobuf()


def sparse_tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("data_batch_1.bin")
        info.pax_headers = {"GNU.sparse.size": "4000000000", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,0"}
        archive.addfile(info, io.BytesIO(b""))
    return gzipped(out.getvalue())


class Hostile(NamedTuple):
    reader: str
    part: str  # of the name of the file in whose place it stands
    make: Callable[[], bytes]


def hostile() -> list[Hostile]:
    big = npy(np.zeros((1, 3), np.float32)).replace(b"(1, 3)", b"(900000000, 3)")
    many = b"\x80\x02X\x00\x00\x10\x00" + b"a" * (1 << 20) + b"q\0]("
    laughs = b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    for i in range(ord("b"), ord("z")):
        laughs += b"%c: &%c [" % (i, i) + b", ".join([b"*%c" % (i - 1)] * 9) + b"]\n"
    return [
        Hostile("pickle", "data_batch_1", lambda: pickle.dumps({"labels": [0], "data": Pointers()}, 2)),
        Hostile("pickle", "data_batch_1", lambda: b"\x80\x02}r\xff\xff\xff\x0f."),
        Hostile("pickle", "data_batch_1", lambda: b"\x80\x02}r\xff\xff\xff\xff."),
        Hostile("pickle", "data_batch_1", lambda: many + b"c_codecs\nencode\nh\0U\6latin1\x86R" * 20_000 + b"e."),
        Hostile("pickle", "data_batch_1", lambda: b"\x80\x02" + b"]" * 500_000 + b"a" * 499_999 + b"."),
        Hostile("pickle", "data_batch_1", lambda: b"\x80\x02" + b")" + b"\x85" * 500_000 + b"K\0s."),
        Hostile(
            "pickle",
            "data_batch_1",
            lambda: b"\x80\x02}(U\6labels](U\xff" + b"a" * 255 + b"K\0" * 100_000 + b"eU\4dataNu.",
        ),
        Hostile("npz", "own/0.npz", lambda: zipped({"x.npy": big, "y.npy": npy(np.array([0]))})),
        Hostile("npz", "own/0.npz", lambda: zipped(zeros_npy(64))),
        Hostile("npz", "own/0.npz", lambda: zipped(zeros_npy(15))),
        Hostile("npz", "own/0.npz", lambda: zipped(zeros_npy(15), zipfile.ZIP_LZMA)),
        Hostile("npz", "own/0.npz", lambda: lying_zip(zeros_npy(64)["x.npy"], 200)),
        Hostile("npz", "own/0.npz", lambda: npz(x=np.zeros((2, 3)), y=[0, 10**15])),
        Hostile("idx", "train-images", lambda: bytes([0, 0, 8, 3]) + struct.pack(">3I", 1 << 31, 1 << 31, 4)),
        Hostile(
            "gz", "train-images", lambda: bomb_of(bytes([0, 0, 8, 3]) + struct.pack(">3I", 3 << 20, 32, 32), 3 << 10)
        ),
        Hostile("gz", "train-labels", lambda: bomb_of(bytes([0, 0, 8, 1]) + struct.pack(">I", 3 << 30), 3 << 10)),
        Hostile("gz", "train-images", lambda: bomb_of(bytes([0, 0, 8, 3]) + struct.pack(">3I", 20 << 20, 1, 1), 20)),
        Hostile("gz", "binary.tar.gz", lambda: bomb_of(long_member(), 3 << 10)),
        Hostile("gz", "binary.tar.gz", sparse_tar),
        Hostile("PNG", "1.png", lambda: flat_png(13_000, 13_000)),
        Hostile("PNG", "1.png", lambda: flat_png(7_000, 7_000)),
        Hostile("PNG", "1.png", lambda: flat_png(20_000, 20_000)),
        Hostile(
            "other pictures",
            "1.webp",
            lambda: b"RIFF\x24\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0\xfe\x3f\0\xfe\x3f\0" + bytes(9),
        ),
        Hostile("CSV", "t.csv", lambda: b"client,from,to\n0,1,400000000\n"),
        Hostile("CSV", "t.csv", lambda: b"client,from,to\n0,1,1e300\n"),
        Hostile("CSV", "t.csv", lambda: b"client,from,to\n0,1.5,3\n"),
        Hostile("CSV", "t.csv", lambda: b"\xef\xbb\xbfclient,from,to\n0,1,3\n"),
        Hostile("CSV", "t.csv", lambda: b"client,from,to\n0,1,\xe9\n"),
        Hostile("CSV", "t.csv", lambda: b"client,from,to\n0,1," + b"1" * 200_000),
        Hostile("LEAF, json", "femnist/train", lambda: leaf([[0.0] * 784] * 100, ["a" * (1 << 20)] + ["b"] * 99)),
        Hostile("LEAF, json", "femnist/train", lambda: b"[" * 200_000),
        Hostile("LEAF, json", "lists.json", lambda: b'{"train": [[' + b"[" * 900 + b"]" * 900 + b"]]}"),
        Hostile("LEAF, json", "config.json", lambda: b'{"num_clients": 100000000000, "num_classes": 1e400}'),
        Hostile("xz, bz2", "roles.json.xz", lambda: lzma.compress(b'{"a": ["' + bytes(64 << 20) + b'"]}', preset=0)),
        Hostile("xz, bz2", "usps.bz2", lambda: bz2.compress(b"1\n" * (8 << 20))),
        Hostile("YAML", "study.yaml", lambda: laughs),
        Hostile("YAML", "study.yaml", lambda: b"task: &a {data: *a}"),
        Hostile("YAML", "study.yaml", lambda: b"[" * 100_000),
    ]
