"""Tensors in files that torch.save wrote, zipped or as before torch 1.6, read like any pickle of plain arrays."""

import math
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparing.core.errors import DataError
from sparing.data.files.pickles import PICKLE_CODES, PICKLE_WORDS, VALUE_MAKERS, PickleMachine, PickleWord
from sparing.data.files.plain_arrays import array_from_bytes, plain_dtype
from sparing.data.files.unpacking import damage_as_data_error
from sparing.data.files.zips import read_zip_members

_STORAGE_TYPES = {
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
_OLD_TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # of the old form
_LENGTH_WIDTH = 8  # bytes of a storage's length in the old form


class _TorchStorage(NamedTuple):
    key: str
    kind: np.dtype
    length: int


class _TensorWindow(NamedTuple):
    """A tensor: where in a storage its values are."""

    storage: _TorchStorage
    offset: int
    shape: tuple[int, ...]


def _make_window(
    machine: PickleMachine, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any
) -> _TensorWindow:
    if not isinstance(storage, _TorchStorage) or type(shape) is not tuple or any(type(n) is not int for n in shape):
        raise TypeError("it holds a tensor without values")
    steps = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if type(stride) is not tuple or any(n > 1 and a != b for n, a, b in zip(shape, stride, steps, strict=True)):
        raise ValueError("it holds a tensor whose values are not in order")
    if type(offset) is not int or offset < 0 or offset + math.prod(shape) > storage.length:
        raise ValueError("it holds a tensor that is larger than its storage")
    return _TensorWindow(storage, offset, shape)


def _push_storage(machine: PickleMachine) -> None:
    """Where a pickle refers to a storage that stands outside of it."""
    what, kind, key, _, length, *_ = machine.pop()
    if (
        what != "storage"
        or not isinstance(kind, PickleWord)
        or kind.name not in _STORAGE_TYPES
        or type(length) is not int
    ):
        raise TypeError("it refers to something that is no storage of numbers")
    machine.push(_TorchStorage(str(key), plain_dtype(_STORAGE_TYPES[kind.name]), length))


class _TorchMachine(PickleMachine):
    def __init__(self, data: bytes, at: int = 0) -> None:
        super().__init__(data, at)
        self.words = {
            **PICKLE_WORDS,
            ("torch._utils", "_rebuild_tensor_v2"): PickleWord("tensor"),
            ("collections", "OrderedDict"): PickleWord("hooks"),
            **{("torch", name): PickleWord(name) for name in _STORAGE_TYPES},
        }
        self.make = {**VALUE_MAKERS, "tensor": _make_window, "hooks": lambda machine: {}}
        self.codes = {**PICKLE_CODES, ord("Q"): _push_storage}


def read_torch_pair(path: Path) -> list[np.ndarray]:
    """The two tensors of a file, as arrays."""
    with damage_as_data_error(f"{path} is not a pair of tensors"):
        if zipfile.is_zipfile(path):
            pair, held = _read_zipped(path)
        else:
            pair, held = _read_unzipped(path.read_bytes())
        if not isinstance(pair, tuple | list) or [type(one) for one in pair] != [_TensorWindow, _TensorWindow]:
            raise DataError(f"{path} is not a pair of tensors: save (images, labels) with torch.save")
        return [_window_array(window, held[window.storage.key]) for window in pair]


def _read_zipped(path: Path) -> tuple[Any, dict[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].split("/")[0]
        pair = _TorchMachine(read_zip_members(archive, path, [f"{root}/data.pkl"])[0]).run()
        keys = sorted({one.storage.key for one in pair if isinstance(one, _TensorWindow)})
        return pair, dict(
            zip(keys, read_zip_members(archive, path, [f"{root}/data/{key}" for key in keys]), strict=True)
        )


def _read_unzipped(data: bytes) -> tuple[Any, dict[str, bytes]]:
    """Five pickles: a number, the version, the machine, the object and the keys of its storages, which follow."""
    at, found = 0, []
    for _ in range(5):
        machine = _TorchMachine(data, at)
        found.append(machine.run())
        at = machine.at
    magic, _, _, pair, keys = found
    if magic != _OLD_TORCH_MAGIC or not isinstance(pair, tuple | list):
        raise ValueError("it is no file of torch.save")
    sizes = {one.storage.key: one.storage.kind.itemsize for one in pair if isinstance(one, _TensorWindow)}
    held = {}
    for key in keys:
        n = int.from_bytes(data[at : at + _LENGTH_WIDTH], "little") * sizes[key]
        held[key] = data[at + _LENGTH_WIDTH : at + _LENGTH_WIDTH + n]
        at += _LENGTH_WIDTH + n
    return pair, held


def _window_array(window: _TensorWindow, data: bytes) -> np.ndarray:
    size = window.storage.kind.itemsize
    start = window.offset * size
    return array_from_bytes(window.shape, window.storage.kind, data[start : start + math.prod(window.shape) * size])
