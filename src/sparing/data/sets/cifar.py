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
from sparing.data.cache import load_stored
from sparing.data.dataset import Dataset
from sparing.data.files.checksums import check_sample_count, verify_checksum
from sparing.data.files.images import read_mosaic
from sparing.data.files.locations import FileForm, curl_command
from sparing.data.files.npy import read_npz
from sparing.data.files.pickles import unpickle
from sparing.data.files.unpacking import BoundedStream, damage_as_data_error
from sparing.data.pooling import official_test_mask, to_number_array
from sparing.data.registry import register_dataset
from sparing.data.sets.cifar_names import CIFAR10_CLASSES, CIFAR100_CLASSES, CIFAR100_SUPERCLASSES

_IMAGE_BYTES = 3 * 32 * 32
_Records = Iterator[tuple[str, np.ndarray]]
"""For each file of the binary version: its name, and its records as uint8 `[n, labels + 3072]`."""


class _CifarVersion(NamedTuple):
    name: str
    files: dict[str, int]  # the binary version's files and how many records each has
    keys: tuple[str, ...]  # the labels of a record, as the Python version calls them; the class is the last
    binary: str  # the folder inside the archive
    python: str
    archive: str


_CIFAR10 = _CifarVersion(
    "cifar10",
    {**{f"data_batch_{i}.bin": 10_000 for i in (1, 2, 3, 4, 5)}, "test_batch.bin": 10_000},
    ("labels",),
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    "cifar-10-{}.tar.gz",
)
_CIFAR100 = _CifarVersion(
    "cifar100",
    {"train.bin": 50_000, "test.bin": 10_000},
    ("coarse_labels", "fine_labels"),
    "cifar-100-binary",
    "cifar-100-python",
    "cifar-100-{}.tar.gz",
)


@register_dataset("cifar10")
def _load_cifar10(check: bool = True) -> Dataset:
    """60,000 colour pictures of 10 kinds of things, 32x32"""
    return load_stored("cifar10", _cifar_forms(_CIFAR10), _cifar_fetch(_CIFAR10), check=check)


@register_dataset("cifar100")
def _load_cifar100(check: bool = True) -> Dataset:
    """60,000 colour pictures of 100 kinds of things in 20 superclasses, 32x32"""
    mosaics = FileForm(_MOSAIC_FILES, ("", "cifar100"), partial(_read_cifar, _CIFAR100, _records_from_mosaics))
    return load_stored("cifar100", [*_cifar_forms(_CIFAR100), mosaics], _cifar_fetch(_CIFAR100), check=check)


def _cifar_forms(kind: _CifarVersion) -> list[FileForm]:
    def folders(inside: str) -> tuple[str, ...]:
        return inside, f"{kind.name}/{inside}", kind.name

    bins, pickles = tuple(kind.files), tuple(file.removesuffix(".bin") for file in kind.files)
    archives = ("", kind.name)
    return [
        FileForm((kind.archive.format("binary"),), archives, partial(_read_cifar, kind, _records_from_archive)),
        FileForm(bins, folders(kind.binary), partial(_read_cifar, kind, _records_from_bins)),
        FileForm((kind.archive.format("python"),), archives, partial(_read_cifar, kind, _records_from_archive)),
        FileForm(pickles, folders(kind.python)[:2], partial(_read_cifar, kind, _records_from_pickles)),
    ]


def _cifar_fetch(kind: _CifarVersion) -> str:
    return curl_command("https://www.cs.toronto.edu/~kriz", kind.archive.format("binary"))


def _read_cifar(
    kind: _CifarVersion, source: Callable[[_CifarVersion, list[Path], bool], _Records], paths: list[Path], check: bool
) -> Dataset:
    found = dict(source(kind, paths, check))
    for file, wanted in kind.files.items():
        if file not in found:
            raise DataError(f"{paths[0]} lacks {file}")
        if check:
            check_sample_count(f"{file} of {paths[0]}", len(found[file]), wanted)
            verify_checksum(f"{kind.name}/{file}", found[file].data, f"{file} of {paths[0]}")
    *train, test = (found[file] for file in kind.files)
    records = torch.from_numpy(np.concatenate([*train, test]))
    labels, x = records[:, :-_IMAGE_BYTES].long(), records[:, -_IMAGE_BYTES:].reshape(-1, 3, 32, 32)
    official = official_test_mask(len(records) - len(test), len(test))
    if kind is _CIFAR10:
        return Dataset(kind.name, x, labels[:, 0], 10, official, names={"class": CIFAR10_CLASSES})
    if bool((labels[:, 0] >= 20).any()):
        raise DataError(
            f"{paths[0]} has superclass {int(labels[:, 0].max())}, out of range: there are 20, numbered from 0"
        )
    names = {"class": CIFAR100_CLASSES, "superclass": CIFAR100_SUPERCLASSES}
    return Dataset(kind.name, x, labels[:, 1], 100, official, {"superclass": labels[:, 0].clone()}, names)


def _records_from_bins(kind: _CifarVersion, paths: list[Path], check: bool) -> _Records:
    for path in paths:
        with damage_as_data_error(f"{path} cannot be read"):
            data = path.read_bytes()
        yield path.name, _split_records(data, kind, str(path))


def _records_from_pickles(kind: _CifarVersion, paths: list[Path], check: bool) -> _Records:
    for path in paths:
        with damage_as_data_error(f"{path} cannot be read"):
            data = path.read_bytes()
        yield f"{path.name}.bin", _records_from_pickle(data, path.name, kind, str(path), check)


def _records_from_archive(kind: _CifarVersion, paths: list[Path], check: bool) -> _Records:
    """The files of a binary or a Python archive, wherever in it they are."""
    for name, data in _archived_files(kind, paths[0]):
        where = f"{name} of {paths[0]}"
        if name in kind.files:
            yield name, _split_records(data, kind, where)
        else:
            yield f"{name}.bin", _records_from_pickle(data, name, kind, where, check)


def _archived_files(kind: _CifarVersion, path: Path) -> Iterator[tuple[str, bytes]]:
    wanted = {*kind.files, *(file.removesuffix(".bin") for file in kind.files)}
    with damage_as_data_error(f"{path} is cut short or damaged"), gzip.open(path) as file:
        stream: Any = BoundedStream(file, path)
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                name, held = Path(member.name).name, archive.extractfile(member) if member.isfile() else None
                if held and name in wanted:
                    if member.issparse():  # a few bytes may stand for any number of zeros
                        raise DataError(f"{name} of {path} is a sparse file: pack it with tar again, without -S")
                    yield name, held.read()


def _split_records(data: bytes, kind: _CifarVersion, where: str) -> np.ndarray:
    size = len(kind.keys) + _IMAGE_BYTES
    if not data or len(data) % size:
        raise DataError(f"{where} is wrong-sized: {len(data):,} bytes are no whole number of {size}-byte records")
    return np.frombuffer(data, np.uint8).reshape(-1, size)


def _records_from_pickle(data: bytes, name: str, kind: _CifarVersion, where: str, check: bool) -> np.ndarray:
    """The records of one batch of the Python version."""
    if check:
        verify_checksum(f"{kind.name}/{name}", data, where)
    batch = unpickle(data, where)
    if not isinstance(batch, dict):
        raise DataError(f"{where} is no batch of {kind.name} (it holds no dict)")
    lacking = [key for key in (*kind.keys, "data") if key not in batch]
    if lacking:
        raise DataError(f"{where} is no batch of {kind.name} (it has no {lacking[0]!r})")
    columns = [_labels_as_bytes(batch[key], f"{where}, {key},") for key in kind.keys]
    images = batch["data"]
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_IMAGE_BYTES,):
        raise DataError(f"{where} is no batch of {kind.name} (its data is no array of {_IMAGE_BYTES} bytes a row)")
    return _join_records(columns, images, where)


def _labels_as_bytes(values: Any, where: str) -> np.ndarray:
    """Labels as bytes."""
    column = to_number_array(values, f"{where} has labels")
    if (
        column.ndim != 1
        or column.dtype.kind not in "iu"
        or (len(column) and not 0 <= column.min() <= column.max() < 256)
    ):
        raise DataError(f"{where} has labels that are no list of class numbers: give integers 0, 1, 2, ...")
    return column.astype(np.uint8)


def _join_records(columns: list[np.ndarray], images: np.ndarray, where: str) -> np.ndarray:
    for column in columns:
        if len(column) != len(images):
            raise DataError(f"{where} has {len(images):,} images but {len(column):,} labels: each needs one")
    return np.concatenate([np.stack(columns, 1), images], 1)


_MOSAIC_FILES = ("cifar100_train_a.webp", "cifar100_train_b.webp", "cifar100_test.webp", "cifar100_labels.npz")


def _records_from_mosaics(kind: _CifarVersion, paths: list[Path], check: bool) -> _Records:
    """Lossless pictures that hold all images as tiles in official order, and the labels beside them."""
    for half, pictures in (("train", paths[:2]), ("test", paths[2:3])):
        keys = (f"coarse_{half}", f"fine_{half}")
        held = zip(keys, read_npz(paths[3], *keys), strict=True)
        columns = [_labels_as_bytes(values, f"{key} of {paths[3]}") for key, values in held]
        tiles = np.concatenate([read_mosaic(path, 32) for path in pictures]).reshape(-1, _IMAGE_BYTES)
        if len(tiles) < len(columns[0]):
            raise DataError(f"{pictures[0]} is wrong-sized: {len(tiles):,} tiles for {len(columns[0]):,} labels")
        yield f"{half}.bin", _join_records(columns, tiles[: len(columns[0])], str(paths[3]))
