"""CIFAR-10 and CIFAR-100: the binary version, the Python version, and mosaics of CIFAR-100.

All are read into the records of the binary version, one to two label bytes and 3072 bytes of image, so that one
checksum serves them all; the Python version's files, which are pickles, are compared with their own before that.
"""

import gzip
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.task.data.cache import stored
from sparing.task.data.checks import halves, numbers
from sparing.task.data.checksums import count, verify
from sparing.task.data.cifar_names import FINE, OBJECTS, SUPERCLASSES
from sparing.task.data.images import read_mosaic
from sparing.task.data.npy import read_npz
from sparing.task.data.pickles import unpickle
from sparing.task.data.places import Form, curl
from sparing.task.data.registry import dataset
from sparing.task.data.unpacking import Unpacked, reading
from sparing.task.dataset import Dataset

PIXELS = 3 * 32 * 32
Records = Iterator[tuple[str, np.ndarray]]
"""For each file of the binary version: its name, and its records as uint8 `[n, labels + 3072]`."""


class Kind(NamedTuple):
    name: str
    files: dict[str, int]  # the binary version's files and how many records each has
    keys: tuple[str, ...]  # the labels of a record, as the Python version calls them; the class is the last
    binary: str  # the folder inside the archive
    python: str
    archive: str


CIFAR10 = Kind(
    "cifar10",
    {**{f"data_batch_{i}.bin": 10_000 for i in (1, 2, 3, 4, 5)}, "test_batch.bin": 10_000},
    ("labels",),
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    "cifar-10-{}.tar.gz",
)
CIFAR100 = Kind(
    "cifar100",
    {"train.bin": 50_000, "test.bin": 10_000},
    ("coarse_labels", "fine_labels"),
    "cifar-100-binary",
    "cifar-100-python",
    "cifar-100-{}.tar.gz",
)


@dataset("cifar10")
def cifar10(check: bool = True) -> Dataset:
    """60,000 colour pictures of 10 kinds of things, 32x32"""
    return stored("cifar10", forms(CIFAR10), fetch(CIFAR10), check=check)


@dataset("cifar100")
def cifar100(check: bool = True) -> Dataset:
    """60,000 colour pictures of 100 kinds of things in 20 superclasses, 32x32"""
    mosaics = Form(MOSAICS, ("", "cifar100"), partial(read, CIFAR100, mosaic))
    return stored("cifar100", [*forms(CIFAR100), mosaics], fetch(CIFAR100), check=check)


def forms(kind: Kind) -> list[Form]:
    def folders(inside: str) -> tuple[str, ...]:
        return inside, f"{kind.name}/{inside}", kind.name

    bins, pickles = tuple(kind.files), tuple(file.removesuffix(".bin") for file in kind.files)
    archives = ("", kind.name)
    return [
        Form((kind.archive.format("binary"),), archives, partial(read, kind, from_archive)),
        Form(bins, folders(kind.binary), partial(read, kind, from_bins)),
        Form((kind.archive.format("python"),), archives, partial(read, kind, from_archive)),
        Form(pickles, folders(kind.python)[:2], partial(read, kind, from_pickles)),
    ]


def fetch(kind: Kind) -> str:
    return curl("https://www.cs.toronto.edu/~kriz", kind.archive.format("binary"))


def read(kind: Kind, source: Callable[[Kind, list[Path], bool], Records], paths: list[Path], check: bool) -> Dataset:
    found = dict(source(kind, paths, check))
    for file, wanted in kind.files.items():
        if file not in found:
            raise DataError(f"{paths[0]} lacks {file}")
        if check:
            count(f"{file} of {paths[0]}", len(found[file]), wanted)
            verify(f"{kind.name}/{file}", found[file].data, f"{file} of {paths[0]}")
    *train, test = (found[file] for file in kind.files)
    records = torch.from_numpy(np.concatenate([*train, test]))
    labels, x = records[:, :-PIXELS].long(), records[:, -PIXELS:].reshape(-1, 3, 32, 32)
    official = halves(len(records) - len(test), len(test))
    if kind is CIFAR10:
        return Dataset(kind.name, x, labels[:, 0], 10, official, names={"class": OBJECTS})
    if bool((labels[:, 0] >= 20).any()):
        raise DataError(
            f"{paths[0]} has superclass {int(labels[:, 0].max())}, out of range: there are 20, numbered from 0"
        )
    names = {"class": FINE, "superclass": SUPERCLASSES}
    return Dataset(kind.name, x, labels[:, 1], 100, official, {"superclass": labels[:, 0].clone()}, names)


def from_bins(kind: Kind, paths: list[Path], check: bool) -> Records:
    for path in paths:
        with reading(f"{path} cannot be read"):
            data = path.read_bytes()
        yield path.name, records_of(data, kind, str(path))


def from_pickles(kind: Kind, paths: list[Path], check: bool) -> Records:
    for path in paths:
        with reading(f"{path} cannot be read"):
            data = path.read_bytes()
        yield f"{path.name}.bin", records_from(data, path.name, kind, str(path), check)


def from_archive(kind: Kind, paths: list[Path], check: bool) -> Records:
    """The files of a binary or a Python archive, wherever in it they are."""
    for name, data in archived(kind, paths[0]):
        where = f"{name} of {paths[0]}"
        if name in kind.files:
            yield name, records_of(data, kind, where)
        else:
            yield f"{name}.bin", records_from(data, name, kind, where, check)


def archived(kind: Kind, path: Path) -> Iterator[tuple[str, bytes]]:
    wanted = {*kind.files, *(file.removesuffix(".bin") for file in kind.files)}
    with reading(f"{path} is cut short or damaged"), gzip.open(path) as file:
        stream: Any = Unpacked(file, path)
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name, held = Path(member.name).name, archive.extractfile(member) if member.isfile() else None
                if held and name in wanted:
                    if member.issparse():  # a few bytes may stand for any number of zeros
                        raise DataError(f"{name} of {path} is a sparse file: pack it with tar again, without -S")
                    yield name, held.read()


def records_of(data: bytes, kind: Kind, where: str) -> np.ndarray:
    size = len(kind.keys) + PIXELS
    if not data or len(data) % size:
        raise DataError(f"{where} is wrong-sized: {len(data):,} bytes are no whole number of {size}-byte records")
    return np.frombuffer(data, np.uint8).reshape(-1, size)


def records_from(data: bytes, name: str, kind: Kind, where: str, check: bool) -> np.ndarray:
    """The records of one batch of the Python version."""
    if check:
        verify(f"{kind.name}/{name}", data, where)
    batch = unpickle(data, where)
    if not isinstance(batch, dict):
        raise DataError(f"{where} is no batch of {kind.name} (it holds no dict)")
    lacking = [key for key in (*kind.keys, "data") if key not in batch]
    if lacking:
        raise DataError(f"{where} is no batch of {kind.name} (it has no {lacking[0]!r})")
    columns = [byte_column(batch[key], f"{where}, {key},") for key in kind.keys]
    images = batch["data"]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
        raise DataError(f"{where} is no batch of {kind.name} (its data is no array of {PIXELS} bytes a row)")
    return records_with(columns, images, where)


def byte_column(values: Any, where: str) -> np.ndarray:
    """Labels as bytes."""
    column = numbers(values, f"{where} has labels")
    if (
        column.ndim != 1
        or column.dtype.kind not in "iu"
        or (len(column) and not 0 <= column.min() <= column.max() < 256)
    ):
        raise DataError(f"{where} has labels that are no list of class numbers: give integers 0, 1, 2, ...")
    return column.astype(np.uint8)


def records_with(columns: list[np.ndarray], images: np.ndarray, where: str) -> np.ndarray:
    for column in columns:
        if len(column) != len(images):
            raise DataError(f"{where} has {len(images):,} images but {len(column):,} labels: each needs one")
    return np.concatenate([np.stack(columns, 1), images], 1)


MOSAICS = ("cifar100_train_a.webp", "cifar100_train_b.webp", "cifar100_test.webp", "cifar100_labels.npz")


def mosaic(kind: Kind, paths: list[Path], check: bool) -> Records:
    """Lossless pictures that hold all images as tiles in official order, and the labels beside them."""
    for half, pictures in (("train", paths[:2]), ("test", paths[2:3])):
        keys = (f"coarse_{half}", f"fine_{half}")
        held = zip(keys, read_npz(paths[3], *keys), strict=True)
        columns = [byte_column(values, f"{key} of {paths[3]}") for key, values in held]
        tiles = np.concatenate([read_mosaic(path, 32) for path in pictures]).reshape(-1, PIXELS)
        if len(tiles) < len(columns[0]):
            raise DataError(f"{pictures[0]} is wrong-sized: {len(tiles):,} tiles for {len(columns[0]):,} labels")
        yield f"{half}.bin", records_with(columns, tiles[: len(columns[0])], str(paths[3]))
