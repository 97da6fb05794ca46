"""Masks: ChaCha20's key stream as words, added to vectors modulo 2^m.

A word is the smallest of 8, 16, 32 and 64 bits that holds m. Words wrap around by themselves, and as 2^m divides their
modulus, bits above m are dropped once, when a vector is packed.
"""

import numpy as np
from numpy.typing import NDArray

from sparing.core.errors import SecureError
from sparing.secure.primitives import chacha20

Words = NDArray[np.unsignedinteger]

_CHUNK = 1 << 18
"""Bytes of stream at a time, so that they stay in the cache."""
_ZEROS = bytes(_CHUNK)


def word_type(bits: int) -> np.dtype:
    """
    >>> [word_type(bits).itemsize for bits in (8, 9, 21, 53)]
    [1, 2, 4, 8]
    """
    return np.dtype(f"<u{next(size for size in (1, 2, 4, 8) if bits <= 8 * size)}")


def add_mask(total: Words, key: bytes, times: int = 1) -> None:
    """Add the stream of this key to `total`, in place; with `times` -1 take it away."""
    stream = chacha20(key)
    buffer = np.empty(min(_CHUNK, total.nbytes), np.uint8)
    words = buffer.view(total.dtype)
    change = np.add if times == 1 else np.subtract
    for start in range(0, len(total), len(words)):
        part = total[start : start + len(words)]
        stream.update_into(_ZEROS[: part.nbytes], buffer.data)
        change(part, words[: len(part)], out=part)


def as_words(values: np.ndarray, size: int, bits: int) -> Words:
    """A copy of the values as words, refused where they are not `size` unsigned integers below 2^bits."""
    if values.dtype.kind != "u" or values.shape != (size,):
        raise SecureError(f"values of type {values.dtype} and shape {values.shape}; the sum takes {size} unsigned ones")
    if values.itemsize * 8 > bits and size and int(values.max()) >> bits:
        raise SecureError(f"a value of {int(values.max())} in a sum modulo 2^{bits}; it would wrap: use more bits")
    return values.astype(word_type(bits))
