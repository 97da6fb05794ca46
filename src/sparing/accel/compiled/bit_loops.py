"""Bytes that compiled loops put together: varints, bits in a row, and pieces joined."""

import numpy as np

from sparing.accel.compiled.compile import compiled


@compiled
def length_of(x: int) -> int:
    """Bits of a whole number that is not negative."""
    length = 0
    while x >> length:
        length += 1
    return length


@compiled
def varint_size(x: int) -> int:
    """`index.varint_size`."""
    return (length_of(x | 1) + 6) // 7


@compiled
def varints(numbers: np.ndarray) -> np.ndarray:
    """`index.varint` of one after the other."""
    out, used = np.empty(10 * len(numbers), np.uint8), 0
    for i in range(len(numbers)):
        x = numbers[i]
        while x > 127:
            out[used] = x & 127 | 128
            used, x = used + 1, x >> 7
        out[used] = x
        used += 1
    return out[:used]


@compiled
def varint(x: int) -> np.ndarray:
    one = np.empty(1, np.int64)
    one[0] = x
    return varints(one)


@compiled
def byte(x: int) -> np.ndarray:
    out = np.empty(1, np.uint8)
    out[0] = x
    return out


@compiled
def joined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = np.empty(len(a) + len(b), np.uint8)
    out[: len(a)] = a
    out[len(a) :] = b
    return out


@compiled
def set_bits(out: np.ndarray, places: np.ndarray) -> None:
    """Bit i of byte j is place 8 j + i."""
    for place in places:
        out[place >> 3] |= np.uint8(1 << (place & 7))


@compiled
def packed_bits(numbers: np.ndarray, width: int) -> np.ndarray:
    """`index.pack` of numbers below 2^width, 1 to 8."""
    out = np.zeros((len(numbers) * width + 7) // 8, np.uint8)
    waiting, held, used = 0, 0, 0
    for i in range(len(numbers)):
        waiting |= np.int64(numbers[i]) << held
        held += width
        while held >= 8:
            out[used] = waiting & 255
            used, waiting, held = used + 1, waiting >> 8, held - 8
    if held:
        out[used] = waiting
    return out
