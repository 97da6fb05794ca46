"""Files of other people's making: how far a compressed one is unpacked, and how damage becomes one sentence.

A file may hold 32 MiB, and beyond that 20 times its own size. Pictures and text pack to a third or a tenth; only
something made to fill the memory packs to a thousandth.
"""

import bz2
import csv
import gzip
import json
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparing.core.errors import DataError

_FREE_BYTES = 32 << 20
_MOST_RATIO = 20
_READ_SIZE = 1 << 20
_XZ_MEMORY = 128 << 20  # xz itself asks for up to 65 MiB to unpack

PARSER_ERRORS = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    csv.Error,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)
"""What parsers raise on bytes that they did not expect."""


@contextmanager
def damage_as_data_error(problem: str) -> Iterator[None]:
    """Damage met in this block becomes a DataError: the problem, and in brackets what the parser says of it.

    >>> with damage_as_data_error("a.json is no json"):
    ...     json.loads("{")
    Traceback (most recent call last):
    sparing.core.errors.DataError: a.json is no json (Expecting property name enclosed in double quotes: ...)
    """
    try:
        yield
    except PARSER_ERRORS as error:
        raise DataError(f"{problem} ({one_line(error) or type(error).__name__})") from None


def one_line(value: Any, most: int = 120) -> str:
    """Text from a file, fit to stand in a sentence: one line, printable, not long.

    >>> one_line("first\\nsecond" + 200 * "!", most=12)
    'first second...'
    """
    text = str(value)[: 4 * most]
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text if len(text) <= most else text[:most] + "..."


def _most_unpacked(packed: int) -> int:
    """The most bytes that a file of so many bytes may hold.

    >>> _most_unpacked(3_000_000)
    93554432
    """
    return _FREE_BYTES + _MOST_RATIO * packed


def check_unpacked_size(where: str, held: int, packed: int) -> None:
    if held > _most_unpacked(packed):
        raise DataError(
            f"{where} is {packed:,} bytes but holds more than {_most_unpacked(packed):,}, "
            "the most that is unpacked from a file "
            "of that size: unpack it by hand, or save it without compression"
        )


_OPENERS = {".gz": gzip.open, ".bz2": bz2.open}


def read_unpacked(path: Path) -> bytes:
    """The bytes of a file, unpacked where it ends in .gz, .bz2 or .xz."""
    with damage_as_data_error(f"{path} is cut short or damaged"):
        packed = path.stat().st_size
        if path.suffix == ".xz":
            held = _unpack_xz(path.read_bytes(), _most_unpacked(packed) + 1)
            check_unpacked_size(str(path), len(held), packed)
            return held
        if path.suffix not in _OPENERS:
            return path.read_bytes()
        with _OPENERS[path.suffix](path, "rb") as file:
            stream = BoundedStream(file, path)
            return b"".join(iter(lambda: stream.read(_READ_SIZE), b""))


def _unpack_xz(data: bytes, length: int) -> bytes:
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
    held = unpacker.decompress(data, length)
    if not unpacker.eof and len(held) < length:
        raise EOFError("the end is missing")
    return held


class BoundedStream:
    """A compressed file as a stream that ends in a DataError where it holds too much."""

    def __init__(self, file: gzip.GzipFile | bz2.BZ2File, path: Path) -> None:
        self.file, self.where, self.packed = file, str(path), path.stat().st_size
        self.held = 0

    def read(self, n: int) -> bytes:
        data = self.file.read(n)
        self.held += len(data)
        check_unpacked_size(self.where, self.held, self.packed)
        return data


def read_json(path: Path, problem: str) -> Any:
    """What a json file holds; a byte-order mark before it means nothing."""
    with damage_as_data_error(problem):
        return json.loads(read_unpacked(path).decode("utf-8-sig"))
