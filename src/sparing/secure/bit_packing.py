"""Vectors of m-bit integers as bytes, in m bits each: one plane of bits after the other.

m is taken apart into powers of two, the largest first: 21 = 16 + 4 + 1. The lowest 16 bits of all values come first, as
integers; then the next 4 of all values, two to a byte; then the last. A plane narrower than a byte is cut into as many
equal stretches as fit in a byte, the first in its lowest bits, and padded with zeros.
"""

import numpy as np

from sparing.core.errors import SecureError
from sparing.secure.masks import Words, word_type


def packed_bytes(size: int, bits: int) -> int:
    """
    >>> packed_bytes(8, 21), packed_bytes(1_600_000, 21)
    (21, 4200000)
    """
    return sum(-(-size * width // 8) for width, _ in _planes(bits))


def pack_words(values: Words, bits: int) -> bytes:
    """The values modulo 2^bits.

    >>> unpack_words(pack_words(np.array([1, 2**21 - 1, 2**21], "<u4"), 21), 3, 21).tolist()
    [1, 2097151, 0]
    """
    parts = []
    for width, shift in _planes(bits):
        plane = values >> values.dtype.type(shift) if shift else values
        if width >= 8:
            parts.append(plane.astype(f"<u{width // 8}"))
            continue
        per = 8 // width
        rows = -(-len(values) // per)
        narrow = np.zeros(per * rows, np.uint8)
        np.bitwise_and(plane.astype(np.uint8), (1 << width) - 1, out=narrow[: len(values)])
        stretches = narrow.reshape(per, rows)
        packed = stretches[0].copy()
        for i in range(1, per):
            packed |= stretches[i] << (i * width)
        parts.append(packed)
    return b"".join(part.data for part in parts)


def unpack_words(data: bytes | memoryview, size: int, bits: int) -> Words:
    if len(data) != packed_bytes(size, bits):
        raise SecureError(f"{len(data)} bytes, where {size} values of {bits} bits take {packed_bytes(size, bits)}")
    values, at = np.zeros(0, word_type(bits)), 0
    for width, shift in _planes(bits):
        if width >= 8:
            plane, n = np.frombuffer(data, f"<u{width // 8}", size, at), size * width // 8
        else:
            n = -(-size * width // 8)
            plane = _narrow_plane(np.frombuffer(data, np.uint8, n, at), width, size)
        at += n
        if not shift:
            values = plane.astype(word_type(bits))
        else:
            values |= plane.astype(values.dtype) << values.dtype.type(shift)
    return values


def _narrow_plane(packed: np.ndarray, width: int, size: int) -> np.ndarray:
    per = 8 // width
    stretches = np.empty((per, len(packed)), np.uint8)
    for i in range(per):
        np.bitwise_and(packed >> (i * width), (1 << width) - 1, out=stretches[i])
    plane = stretches.reshape(-1)
    if plane[size:].any():
        raise SecureError("packed values with something in their padding; send them again")
    return plane[:size]


def _planes(bits: int) -> list[tuple[int, int]]:
    """Width and lowest bit of each."""
    planes, shift = [], 0
    for width in (64, 32, 16, 8, 4, 2, 1):
        if bits & width:
            planes.append((width, shift))
            shift += width
    return planes
