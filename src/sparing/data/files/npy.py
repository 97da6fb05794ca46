"""Arrays of numbers and text in numpy's npy and npz files, made from a checked header and the bytes behind it."""

import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from sparing.core.errors import DataError
from sparing.data.files.pickles import unpickle
from sparing.data.files.plain_arrays import array_from_bytes, plain_dtype
from sparing.data.files.unpacking import damage_as_data_error, one_line
from sparing.data.files.zips import read_zip_members

_NPY_MAGIC = b"\x93NUMPY"
_LENGTH_BYTES = {1: 2, 2: 4}  # how many bytes say the length of the header, by version
_LONGEST_HEADER = 10_000  # bytes of a header
_HEADER_ENTRY = re.compile(
    rb"""\s*(?:['"]descr['"]\s*:\s*['"](?P<descr>[^'"]{1,9})['"]"""
    rb"""|['"]fortran_order['"]\s*:\s*(?P<fortran>True|False)"""
    rb"""|['"]shape['"]\s*:\s*\((?P<shape>[\d\sL,]*)\))\s*(?:,|(?=\}))"""
)
_OBJECT_DESCR = "|O"


class _NpyHeader:
    """What an npy file says of its array, and where the array's bytes start."""

    def __init__(self, data: bytes) -> None:
        if data[:6] != _NPY_MAGIC or len(data) < 12 or data[6] not in _LENGTH_BYTES:
            raise ValueError(f"it starts with {data[:8].hex(' ') or 'nothing'}, which is no npy file")
        start = 8 + _LENGTH_BYTES[data[6]]
        length = int.from_bytes(data[8:start], "little")
        if length > _LONGEST_HEADER or start + length > len(data):
            raise ValueError(f"its header takes {length:,} bytes")
        found = _header_entries(data[start : start + length])
        self.start = start + length
        self.descr = found["descr"].decode("latin1")
        self.fortran = found["fortran"] == b"True"
        self.shape = tuple(int(n) for n in re.findall(rb"\d{1,19}", found["shape"]))


def _header_entries(header: bytes) -> dict[str, bytes]:
    """The three entries of a header such as {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }."""
    text, at, found = header.strip(), 1, {}
    while match := _HEADER_ENTRY.match(text, at):
        found |= {name: value for name, value in match.groupdict().items() if value is not None}
        at = match.end()
    if not text.startswith(b"{") or text[at:].strip() != b"}" or len(found) != 3:
        raise ValueError(f"its header is {one_line(header.decode('latin1'))}")
    return found


def _array_from_npy(data: bytes) -> np.ndarray:
    """The array of an npy file; ValueError where it is none of numbers or text.

    >>> import io
    >>> np.save(file := io.BytesIO(), np.arange(3))
    >>> _array_from_npy(file.getvalue())
    array([0, 1, 2])
    """
    header = _NpyHeader(data)
    kind = plain_dtype(header.descr)
    return array_from_bytes(header.shape, kind, memoryview(data)[header.start :], header.fortran)


def map_npy(path: Path) -> np.ndarray:
    """An array on the pages of an npy file: they come into memory when touched, and writing never reaches the file."""
    with path.open("rb") as file:
        header = _NpyHeader(file.read(_LONGEST_HEADER + 12))
    kind, held = plain_dtype(header.descr), path.stat().st_size - header.start
    if math.prod(header.shape) * kind.itemsize != held:
        raise ValueError(f"its shape {header.shape} does not take the {held:,} bytes that are there")
    if not held:
        return np.empty(header.shape, kind)
    order = "F" if header.fortran else "C"
    return np.memmap(path, kind, "c", header.start, header.shape, order)


def read_npz(path: Path, *wanted: str) -> list[np.ndarray]:
    """These arrays of an npz file."""
    with (
        damage_as_data_error(f"{path} is cut short, damaged or no npz file of plain arrays"),
        zipfile.ZipFile(path) as archive,
    ):
        has = _arrays_in_archive(archive)
        lacking = [name for name in wanted if name not in has]
        if not lacking:
            return [_array_from_npy(data) for data in read_zip_members(archive, path, [has[name] for name in wanted])]
    raise DataError(f"{path} has no array {lacking[0]!r} (it has {one_line(', '.join(has))})")


def read_whole_npz(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file, in its order."""
    with (
        damage_as_data_error(f"{path} is cut short, damaged or no npz file of plain arrays"),
        zipfile.ZipFile(path) as archive,
    ):
        has = _arrays_in_archive(archive)
        return dict(zip(has, map(_array_from_npy, read_zip_members(archive, path, list(has.values()))), strict=True))


def read_npz_object(path: Path, name: str) -> Any:
    """The one Python object that numpy pickled into an npz file under this name."""
    with damage_as_data_error(f"{path} is cut short, damaged or has no {name!r}"), zipfile.ZipFile(path) as archive:
        (data,) = read_zip_members(archive, path, [_arrays_in_archive(archive)[name]])
        header = _NpyHeader(data)
        if header.descr != _OBJECT_DESCR or header.shape != ():
            raise ValueError(f"{name} is no single object")
    return unpickle(data[header.start :], str(path))


def _arrays_in_archive(archive: zipfile.ZipFile) -> dict[str, str]:
    """The files in an archive by the names of their arrays."""
    return {name.removesuffix(".npy"): name for name in archive.namelist()}
