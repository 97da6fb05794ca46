"""The idx format of MNIST and the datasets that took it over."""

import math
import struct
from functools import partial
from pathlib import Path

import numpy as np

from sparing.core.errors import DataError
from sparing.data.cache import load_stored
from sparing.data.dataset import Dataset
from sparing.data.files.checksums import check_sample_count, verify_checksum
from sparing.data.files.locations import FileForm, curl_command
from sparing.data.files.npy import read_npz
from sparing.data.files.plain_arrays import array_from_bytes
from sparing.data.files.unpacking import damage_as_data_error, read_unpacked
from sparing.data.pooling import SourcePart, official_test_mask, pool_parts
from sparing.data.registry import register_dataset

_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
MNIST_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
MNIST_FILES = tuple(f"{name}[.gz]" for name in MNIST_NAMES)
_DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
_GARMENTS = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


@register_dataset("mnist")
def _load_mnist(check: bool = True) -> Dataset:
    """70,000 handwritten digits, 28x28

    `check=False` takes files of any length, as long as they are idx files of images and labels.
    """
    return load_stored("mnist", _MNIST_FORMS, MNIST_FETCH, check=check)


@register_dataset("fashion-mnist")
def _load_fashion_mnist(check: bool = True) -> Dataset:
    """70,000 pictures of garments, 28x28; also from Debian's dataset-fashion-mnist"""
    return load_stored("fashion-mnist", _FASHION_FORMS, _FASHION_FETCH, check=check)


def _read_mnist(name: str, classes: list[str], paths: list[Path], check: bool) -> Dataset:
    contents, where = [read_unpacked(path) for path in paths], [str(path) for path in paths]
    if check:
        _check_mnist(name, contents, where)
    return _mnist_dataset(name, classes, [array_from_idx(*pair) for pair in zip(contents, where, strict=True)], where)


def _read_mnist_npz(paths: list[Path], check: bool) -> Dataset:
    """MNIST as Keras has it, in one npz file."""
    keys = ("x_train", "y_train", "x_test", "y_test")
    arrays, where = read_npz(paths[0], *keys), [f"{key} of {paths[0]}" for key in keys]
    if check:
        for i, array in enumerate(arrays):
            if array.dtype != np.uint8 or array.ndim != _FILE_AXES[i]:
                raise DataError(
                    f"{where[i]} has type {array.dtype} and {array.ndim} axes, not uint8 and {_FILE_AXES[i]}"
                )
        _check_mnist("mnist", [_array_as_idx(array) for array in arrays], where)
    return _mnist_dataset("mnist", _DIGIT_NAMES, arrays, where)


def _check_mnist(name: str, contents: list[bytes], where: list[str]) -> None:
    """Refuse idx files that are not the official ones, by their length and their SHA-256 alone."""
    for i, file in enumerate(MNIST_NAMES):
        check_sample_count(where[i], (len(contents[i]) - 4 - 4 * _FILE_AXES[i]) // _SAMPLE_BYTES[i], _OFFICIAL_SIZES[i])
        verify_checksum(f"{name}/{file}", contents[i], where[i])


def _mnist_dataset(name: str, classes: list[str], arrays: list[np.ndarray], where: list[str]) -> Dataset:
    """Train images, train labels, test images and test labels, put together."""
    x, y = pool_parts([SourcePart(where[0], *arrays[:2]), SourcePart(where[2], *arrays[2:])], len(classes))
    return Dataset(
        name, x, y, len(classes), official_test_mask(len(arrays[0]), len(arrays[2])), names={"class": classes}
    )


_OFFICIAL_SIZES = (60_000, 60_000, 10_000, 10_000)
_FILE_AXES = (3, 1, 3, 1)
_SAMPLE_BYTES = (784, 1, 784, 1)  # bytes a sample
_DIGIT_NAMES = list("0123456789")
_MNIST_FORMS = (
    FileForm(MNIST_FILES, ("mnist", "MNIST/raw"), partial(_read_mnist, "mnist", _DIGIT_NAMES)),
    FileForm(("mnist.npz",), ("mnist", ""), _read_mnist_npz),
    FileForm(("mnist_writers.npz",), ("", "mnist-writers"), _read_mnist_npz),
)
MNIST_FETCH = curl_command("https://ossci-datasets.s3.amazonaws.com/mnist", *(f"{name}.gz" for name in MNIST_NAMES))
_FASHION_FORMS = (
    FileForm(
        MNIST_FILES,
        ("fashion-mnist", "FashionMNIST/raw", _DEBIAN_FOLDER),
        partial(_read_mnist, "fashion-mnist", _GARMENTS),
    ),
)
_FASHION_FETCH = "apt-get install dataset-fashion-mnist, or: " + curl_command(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", *(f"{name}.gz" for name in MNIST_NAMES)
)


def _array_as_idx(array: np.ndarray) -> bytes:
    """The idx file of a uint8 array.

    >>> _array_as_idx(np.array([7, 8], np.uint8)).hex(" ")
    '00 00 08 01 00 00 00 02 07 08'
    """
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def read_idx(path: Path) -> np.ndarray:
    return array_from_idx(read_unpacked(path), str(path))


def array_from_idx(data: bytes, where: str) -> np.ndarray:
    """The array in an idx file.

    >>> array_from_idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), "here")
    array([7, 8, 9], dtype=uint8)
    """
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_TYPES or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{where} is not an idx file: it starts with {data[:4].hex(' ') or 'nothing'}")
    name = Path(where).name
    if f"idx{data[3]}-" not in name and "idx" in name:
        raise DataError(f"{where} is another file than its name says: its header has {data[3]} axes")
    kind, start = np.dtype(_IDX_TYPES[data[2]]), 4 + 4 * data[3]
    if "ubyte" in name and kind != np.uint8:
        raise DataError(f"{where} is another file than its name says: its values are of type {kind.name}")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    needed = math.prod(shape) * kind.itemsize
    if len(data) - start != needed:
        raise DataError(
            f"{where} is wrong-sized: its header says {shape}, which takes {needed:,} bytes, "
            f"but {len(data) - start:,} follow"
        )
    with damage_as_data_error(f"{where} is not an idx file"):
        return array_from_bytes(shape, kind, memoryview(data)[start:]).astype(kind.newbyteorder("="), copy=False)
