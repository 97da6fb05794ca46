"""Arrays of numbers and text made from a shape, a type and bytes that a file names: only if all three agree."""

import math
import re
from collections.abc import Sequence

import numpy as np

_PLAIN_TYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|U\d{1,6})")
_MOST_AXES = 32
_LAST_CHARACTER = 0x10FFFF  # of Unicode
_SURROGATES = (0xD800, 0xDFFF)


def plain_dtype(text: str) -> np.dtype:
    """The type of that name, if it is one of numbers or text.

    >>> plain_dtype("<f4"), plain_dtype("|u1")
    (dtype('float32'), dtype('uint8'))
    """
    if not _PLAIN_TYPE.fullmatch(text):
        raise ValueError(f"its values are of type {text!r}, which are neither numbers nor text")
    return np.dtype(text)


def array_from_bytes(
    shape: Sequence[int], kind: np.dtype, data: bytes | memoryview, fortran: bool = False
) -> np.ndarray:
    """An array on these bytes; ValueError unless it takes all of them and no more.

    >>> array_from_bytes((2,), plain_dtype("<u2"), bytes([1, 0, 2, 0]))
    array([1, 2], dtype=uint16)
    """
    shape = tuple(shape)
    if len(shape) > _MOST_AXES or any(type(n) is not int or n < 0 for n in shape) or 0 in shape[1:]:
        raise ValueError(f"its shape is {str(shape)[:80]}")
    wanted = math.prod(shape) * kind.itemsize
    if wanted != len(data):
        raise ValueError(f"its shape {shape} takes {wanted:,} bytes, but {len(data):,} are there")
    if not wanted:
        return np.empty(shape, kind)
    array = np.ndarray(shape, kind, data, order="F" if fortran else "C")
    if kind.kind == "U":
        _check_characters(array)
    return array


def _check_characters(array: np.ndarray) -> None:
    """Refuse numbers that stand for no character."""
    codes = np.frombuffer(array.tobytes(), np.dtype("u4").newbyteorder(array.dtype.byteorder))
    if np.any((codes > _LAST_CHARACTER) | ((codes >= _SURROGATES[0]) & (codes <= _SURROGATES[1]))):
        raise ValueError("its text holds a number that is no character")
