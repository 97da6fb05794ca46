"""The idx format of MNIST and the datasets that took it over."""

import gzip
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from sparing.core.errors import DataError
from sparing.task.data.cache import stored
from sparing.task.data.checks import Part, halves, pool
from sparing.task.data.checksums import count, verify
from sparing.task.data.places import Form, curl
from sparing.task.data.registry import dataset
from sparing.task.data.safe import read_npz
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
    contents = [content(path) for path in paths]
    arrays = [idx(data, str(path)) for data, path in zip(contents, paths, strict=True)]
    return mnist_like(name, classes, arrays, contents, [str(path) for path in paths], check)


def read_mnist_npz(paths: list[Path], check: bool) -> Dataset:
    """MNIST as Keras has it, in one npz file."""
    keys = ("x_train", "y_train", "x_test", "y_test")
    arrays = read_npz(paths[0], *keys)
    contents = [as_idx(array) for array in arrays]
    return mnist_like("mnist", DIGITS, arrays, contents, [f"{key} of {paths[0]}" for key in keys], check)


def mnist_like(
    name: str, classes: list[str], arrays: list[np.ndarray], contents: list[bytes], where: list[str], check: bool
) -> Dataset:
    """Train images, train labels, test images and test labels, checked and put together."""
    for i, file in enumerate(NAMES if check else ()):
        count(where[i], len(arrays[i]), SIZES[i])
        verify(f"{name}/{file}", contents[i], where[i])
    x, y = pool([Part(where[0], *arrays[:2]), Part(where[2], *arrays[2:])], len(classes))
    return Dataset(name, x, y, len(classes), halves(len(arrays[0]), len(arrays[2])), names={"class": classes})


SIZES = (60_000, 60_000, 10_000, 10_000)
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


def content(path: Path) -> bytes:
    """The bytes of a file, unpacked where it ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"{path} is cut short or damaged ({error})") from None


def idx(data: bytes, where: str) -> np.ndarray:
    """The array in an idx file.

    >>> idx(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]), "here")
    array([7, 8, 9], dtype=uint8)
    """
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in TYPES or len(data) < 4 + 4 * data[3]:
        raise DataError(f"{where} is not an idx file: it starts with {data[:4].hex(' ') or 'nothing'}")
    if f"idx{data[3]}-" not in where and "idx" in Path(where).name:
        raise DataError(f"{where} is another file than its name says: its header has {data[3]} axes")
    start = 4 + 4 * data[3]
    shape, kind = struct.unpack(f">{data[3]}I", data[4:start]), np.dtype(TYPES[data[2]])
    needed = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    if len(data) - start != needed:
        raise DataError(
            f"{where} is wrong-sized: its header says {shape}, which takes {needed:,} bytes, "
            f"but {len(data) - start:,} follow"
        )
    return np.frombuffer(data, kind, offset=start).reshape(shape).astype(kind.newbyteorder("="), copy=False)
