"""Tensors in files that torch.save wrote, zipped or as before torch 1.6, read like any pickle of plain arrays."""

import math
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparing.core.errors import DataError
from sparing.task.data.pickles import CODES, MAKE, WORDS, Machine, Word
from sparing.task.data.plain import array_of, plain_kind
from sparing.task.data.unpacking import reading
from sparing.task.data.zips import members

STORAGES = {
    "ByteStorage": "|u1",
    "CharStorage": "|i1",
    "BoolStorage": "|b1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "HalfStorage": "<f2",
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
}
MAGIC = 0x1950A86A20F9469CFC6C  # of the old form
WIDTH = 8  # bytes of a storage's length in the old form


class Storage(NamedTuple):
    key: str
    kind: np.dtype
    length: int


class Window(NamedTuple):
    """A tensor: where in a storage its values are."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]


def tensor(machine: Machine, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Window:
    if not isinstance(storage, Storage) or type(shape) is not tuple or any(type(n) is not int for n in shape):
        raise TypeError("it holds a tensor without values")
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if type(stride) is not tuple or any(n > 1 and a != b for n, a, b in zip(shape, stride, steps, strict=True)):
        raise ValueError("it holds a tensor whose values are not in order")
    if type(offset) is not int or offset < 0 or offset + math.prod(shape) > storage.length:
        raise ValueError("it holds a tensor that is larger than its storage")
    return Window(storage, offset, shape)


def storage(machine: Machine) -> None:
    """Where a pickle refers to a storage that stands outside of it."""
    what, kind, key, _, length, *_ = machine.pop()
    if what != "storage" or not isinstance(kind, Word) or kind.name not in STORAGES or type(length) is not int:
        raise TypeError("it refers to something that is no storage of numbers")
    machine.push(Storage(str(key), plain_kind(STORAGES[kind.name]), length))


class TorchMachine(Machine):
    def __init__(self, data: bytes, at: int = 0) -> None:
        super().__init__(data, at)
        self.words = {
            **WORDS,
            ("torch._utils", "_rebuild_tensor_v2"): Word("tensor"),
            ("collections", "OrderedDict"): Word("hooks"),
            **{("torch", name): Word(name) for name in STORAGES},
        }
        self.make = {**MAKE, "tensor": tensor, "hooks": lambda machine: {}}
        self.codes = {**CODES, ord("Q"): storage}


def read_torch_pair(path: Path) -> list[np.ndarray]:
    """The two tensors of a file, as arrays."""
    with reading(f"{path} is not a pair of tensors"):
        if zipfile.is_zipfile(path):
            pair, held = zipped(path)
        else:
            pair, held = bare(path.read_bytes())
        if not isinstance(pair, tuple | list) or [type(one) for one in pair] != [Window, Window]:
            raise DataError(f"{path} is not a pair of tensors: save (images, labels) with torch.save")
        return [cut(window, held[window.storage.key]) for window in pair]


def zipped(path: Path) -> tuple[Any, dict[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].split("/")[0]
        pair = TorchMachine(members(archive, path, [f"{root}/data.pkl"])[0]).run()
        keys = sorted({one.storage.key for one in pair if isinstance(one, Window)})
        return pair, dict(zip(keys, members(archive, path, [f"{root}/data/{key}" for key in keys]), strict=True))


def bare(data: bytes) -> tuple[Any, dict[str, bytes]]:
    """Five pickles: a number, the version, the machine, the object and the keys of its storages, which follow."""
    at, found = 0, []
    for _ in range(5):
        machine = TorchMachine(data, at)
        found.append(machine.run())
        at = machine.at
    magic, _, _, pair, keys = found
    if magic != MAGIC or not isinstance(pair, tuple | list):
        raise ValueError("it is no file of torch.save")
    sizes = {one.storage.key: one.storage.kind.itemsize for one in pair if isinstance(one, Window)}
    held = {}
    for key in keys:
        n = int.from_bytes(data[at : at + WIDTH], "little") * sizes[key]
        held[key] = data[at + WIDTH : at + WIDTH + n]
        at += WIDTH + n
    return pair, held


def cut(window: Window, data: bytes) -> np.ndarray:
    size = window.storage.kind.itemsize
    start = window.offset * size
    return array_of(window.shape, window.storage.kind, data[start : start + math.prod(window.shape) * size])
