"""The idx format of MNIST and the datasets that took it over."""

import math
import struct
from functools import partial
from pathlib import Path

import numpy as np

from sparing.core.errors import DataError
from sparing.task.data.cache import stored
from sparing.task.data.checks import Part, halves, pool
from sparing.task.data.checksums import count, verify
from sparing.task.data.npy import read_npz
from sparing.task.data.places import Form, curl
from sparing.task.data.plain import array_of
from sparing.task.data.registry import dataset
from sparing.task.data.unpacking import content, reading
from sparing.task.dataset import Dataset

TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
FILES = tuple(f"{name}[.gz]" for name in NAMES)
DEBIAN = "/usr/share/datasets/fashion-mnist"
GARMENTS = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]


@dataset("mnist")
def mnist(check: bool = True) -> Dataset:
    """70,000 handwritten digits, 28x28

    `check=False` takes files of any length, as long as they are idx files of images and labels.
    """
    return stored("mnist", MNIST, MNIST_FETCH, check=check)


@dataset("fashion-mnist")
def fashion_mnist(check: bool = True) -> Dataset:
    """70,000 pictures of garments, 28x28; also from Debian's dataset-fashion-mnist"""
    return stored("fashion-mnist", FASHION, FASHION_FETCH, check=check)


def read_mnist(name: str, classes: list[str], paths: list[Path], check: bool) -> Dataset:
    contents, where = [content(path) for path in paths], [str(path) for path in paths]
    if check:
        check_mnist(name, contents, where)
    return mnist_like(name, classes, [idx(*pair) for pair in zip(contents, where, strict=True)], where)


def read_mnist_npz(paths: list[Path], check: bool) -> Dataset:
    """MNIST as Keras has it, in one npz file."""
    keys = ("x_train", "y_train", "x_test", "y_test")
    arrays, where = read_npz(paths[0], *keys), [f"{key} of {paths[0]}" for key in keys]
    if check:
        for i, array in enumerate(arrays):
            if array.dtype != np.uint8 or array.ndim != AXES[i]:
                raise DataError(f"{where[i]} has type {array.dtype} and {array.ndim} axes, not uint8 and {AXES[i]}")
        check_mnist("mnist", [as_idx(array) for array in arrays], where)
    return mnist_like("mnist", DIGITS, arrays, where)


def check_mnist(name: str, contents: list[bytes], where: list[str]) -> None:
    """Refuse idx files that are not the official ones, by their length and their SHA-256 alone."""
    for i, file in enumerate(NAMES):
        count(where[i], (len(contents[i]) - 4 - 4 * AXES[i]) // EACH[i], SIZES[i])
        verify(f"{name}/{file}", contents[i], where[i])


def mnist_like(name: str, classes: list[str], arrays: list[np.ndarray], where: list[str]) -> Dataset:
    """Train images, train labels, test images and test labels, put together."""
    x, y = pool([Part(where[0], *arrays[:2]), Part(where[2], *arrays[2:])], len(classes))
    return Dataset(name, x, y, len(classes), halves(len(arrays[0]), len(arrays[2])), names={"class": classes})


SIZES = (60_000, 60_000, 10_000, 10_000)
AXES = (3, 1, 3, 1)
EACH = (784, 1, 784, 1)  # bytes a sample
DIGITS = list("0123456789")
MNIST = (
    Form(FILES, ("mnist", "MNIST/raw"), partial(read_mnist, "mnist", DIGITS)),
    Form(("mnist.npz",), ("mnist", ""), read_mnist_npz),
    Form(("mnist_writers.npz",), ("", "mnist-writers"), read_mnist_npz),
)
MNIST_FETCH = curl("https://ossci-datasets.s3.amazonaws.com/mnist", *(f"{name}.gz" for name in NAMES))
FASHION = (Form(FILES, ("fashion-mnist", "FashionMNIST/raw", DEBIAN), partial(read_mnist, "fashion-mnist", GARMENTS)),)
FASHION_FETCH = "apt-get install dataset-fashion-mnist, or: " + curl(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", *(f"{name}.gz" for name in NAMES)
)


def as_idx(array: np.ndarray) -> bytes:
    """The idx file of a uint8 array.

    >>> as_idx(np.array([7, 8], np.uint8)).hex(" ")
    '00 00 08 01 00 00 00 02 07 08'
    """
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def read_idx(path: Path) -> np.ndarray:
    return idx(content(path), str(path))


def idx(data: bytes, where: str) -> np.ndarray:
    """The array in an idx file.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), "here")
    array([7, 8, 9], dtype=uint8)
    """
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in TYPES or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{where} is not an idx file: it starts with {data[:4].hex(' ') or 'nothing'}")
    name = Path(where).name
    if f"idx{data[3]}-" not in name and "idx" in name:
        raise DataError(f"{where} is another file than its name says: its header has {data[3]} axes")
    kind, start = np.dtype(TYPES[data[2]]), 4 + 4 * data[3]
    if "ubyte" in name and kind != np.uint8:
        raise DataError(f"{where} is another file than its name says: its values are of type {kind.name}")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    needed = math.prod(shape) * kind.itemsize
    if len(data) - start != needed:
        raise DataError(
            f"{where} is wrong-sized: its header says {shape}, which takes {needed:,} bytes, "
            f"but {len(data) - start:,} follow"
        )
    with reading(f"{where} is not an idx file"):
        return array_of(shape, kind, memoryview(data)[start:]).astype(kind.newbyteorder("="), copy=False)
