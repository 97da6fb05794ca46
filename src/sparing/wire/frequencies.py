"""Chances of symbols as whole numbers that add up to 2^bits: told in a few bytes, the same on every machine.

Four kinds of heads tell them, and the sender takes the one that should make head and symbols shortest:

    0 one        one symbol only: that symbol
    1 table      the last symbol, then every chance: bit lengths in unary steps, the bits below the top one plainly
    2 geometric  chances that fall off geometrically to both sides of zero, symbols in zigzag order
    3 normal     the same with a bell's fall

Kinds 2 and 3 are told by their steepness, first and last symbol; between these, every chance is at least 1.
"""

from functools import cache, lru_cache

import numpy as np

from sparing.wire.index import Reader

ONE, TABLE, GEOMETRIC, NORMAL = range(4)
FINE = 12
"""Bits behind the point of a logarithm."""
SCALES = 128
MEANS = np.array([(16, 19, 23, 27)[j % 4] << j // 4 >> 3 for j in range(SCALES)], np.int64)
"""In 128ths, four an octave."""


def logs_of_mantissas() -> np.ndarray:
    """log2(m / 1024) for m = 1024 .. 2047 by repeated squaring of whole numbers."""
    out = []
    for m in range(1024, 2048):
        y, bits = m << 30, 0
        for _ in range(FINE):
            y = y * y >> 40
            bits = bits << 1 | y >> 41
            y >>= y >> 41
        out.append(bits)
    return np.array(out, np.int64)


LOGS = logs_of_mantissas()


def log2(x: np.ndarray) -> np.ndarray:
    """log2 of whole numbers from 1 to 2^53 in 4096ths, int64, by their eleven leading bits.

    >>> log2(np.array([1, 2, 3]))
    array([   0, 4096, 6492])
    """
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return (exponent.astype(np.int64) - 1 << FINE) + LOGS[(mantissa * 2048).astype(np.int64) - 1024]


def price(histogram: np.ndarray, chances: np.ndarray, bits: int) -> np.ndarray:
    """What these symbols take at these chances, in 4096ths of a bit, `[..., 256]` -> `[...]`."""
    return (histogram * ((bits << FINE) - log2(np.maximum(chances, 1)))).sum(-1)


def _scale_weights(weights: np.ndarray, bits: int) -> np.ndarray:
    """Weights as whole numbers that add up to 2^bits, at least 1 where the weight is not zero."""
    total = int(weights.sum())
    out = np.maximum((weights * (1 << bits) + total // 2) // total, weights > 0)
    over = int(out.sum()) - (1 << bits)
    while over:
        largest = int(out.argmax())
        less = min(over, int(out[largest]) >> 1)
        out[largest] -= less
        over -= less
    return out


def write_frequencies(histogram: np.ndarray, bits: int) -> tuple[bytes, np.ndarray]:
    """How the chances of `[256]` counts are told, and the chances."""
    seen = np.flatnonzero(histogram)
    first, last = int(seen[0]), int(seen[-1])
    if first == last:
        return bytes([ONE, first]), _scale_weights(histogram, bits)
    exact = _scale_weights(histogram, bits)
    tried = [(_written_table(exact, last), exact)]
    for kind in (GEOMETRIC, NORMAL):
        scale = scale_of(kind, histogram, first)
        tried.append((bytes([kind, scale, first, last]), _family_of_scale(kind, scale, first, last, bits)))
    sizes = (np.array([len(told) for told, _ in tried], np.int64) << FINE + 3) + price(
        histogram, np.stack([chances for _, chances in tried]), bits
    )
    return tried[int(sizes.argmin())]


def read_frequencies(reader: Reader, bits: int) -> np.ndarray:
    """`[256]` chances from their head."""
    start = reader.at
    kind = reader.byte("kind of chances")
    if kind == ONE:
        chances = np.zeros(256, np.int64)
        chances[reader.byte("symbol")] = 1 << bits
        return chances
    if kind == TABLE:
        return read_table(reader, bits)
    if kind > NORMAL:
        reader.refuse(f"chances of kind {kind}, known are 0 to {NORMAL}", start)
    scale, first, last = (reader.byte(what) for what in ("steepness", "first symbol", "last symbol"))
    if scale >= SCALES or first >= last:
        reader.refuse(f"chances of steepness {scale} from {first} to {last}", start)
    return _family_of_scale(kind, scale, first, last, bits)


# ------------------------------------------------------------------------------------------------------------ tables


def _written_table(chances: np.ndarray, last: int) -> bytes:
    """Kind, last symbol, then for each: the step from the bit length before in unary, zigzag, and the bits below."""
    value = at = before = 0
    for chance in chances[: last + 1].tolist():
        length = chance.bit_length()
        step = 2 * (length - before) if length >= before else 2 * (before - length) - 1
        value |= 1 << at + step
        at += step + 1
        below = max(length - 1, 0)
        value |= (chance & (1 << below) - 1) << at
        at, before = at + below, length
    return bytes([TABLE, last]) + value.to_bytes((at + 7) // 8, "little")


def read_table(reader: Reader, bits: int) -> np.ndarray:
    start = reader.at
    last = reader.byte("last symbol")
    value = int.from_bytes(reader.data[reader.at : min(reader.end, reader.at + (last + 1) * 6)], "little")
    chances = np.zeros(256, np.int64)
    at = before = 0
    for symbol in range(last + 1):
        rest = value >> at
        step = (rest & -rest).bit_length() - 1
        length = before - (step + 1) // 2 if step & 1 else before + step // 2
        if step < 0 or not 0 <= length <= bits:
            reader.refuse(f"the chance of symbol {symbol} has {length} bits, at most {bits} are known", start)
        below = max(length - 1, 0)
        chances[symbol] = (1 << length >> 1) | rest >> step + 1 & (1 << below) - 1
        at, before = at + step + 1 + below, length
    reader.take((at + 7) // 8, "chances")
    if chances.sum() != 1 << bits:
        reader.refuse(f"chances add up to {chances.sum()}, must be {1 << bits}", start)
    return chances


# ---------------------------------------------------------------------------------------------------------- families


ZIGZAG = np.arange(256, dtype=np.int64) + 1 >> 1


def scale_of(kind: int, histogram: np.ndarray, first: int) -> int:
    """The steepness whose mean (for a bell: mean square) comes next."""
    sizes = ZIGZAG - ZIGZAG[first]
    mean = int((histogram * (sizes * sizes if kind == NORMAL else sizes)).sum()) * 128 // int(histogram.sum())
    return min(int(np.searchsorted(MEANS, mean)), SCALES - 1)


@lru_cache(512)
def _family_of_scale(kind: int, scale: int, first: int, last: int, bits: int) -> np.ndarray:
    falls = two_sided_falls(kind, int(MEANS[scale]))[ZIGZAG - ZIGZAG[first]]
    weights = np.zeros(256, np.int64)
    weights[first : last + 1] = np.maximum(falls[first : last + 1], 1)
    out = _scale_weights(weights, bits)
    out.setflags(write=False)
    return out


@cache
def two_sided_falls(kind: int, mean: int) -> np.ndarray:
    """By distance: r^m, or for a bell of mean square `mean` r^(m^2), in 2^-32."""
    out, weight = [], 1 << 32
    ratio = ((2 * mean if kind == NORMAL else mean) << 32) // ((2 * mean if kind == NORMAL else mean) + 128)
    square = ratio * ratio >> 32 if kind == NORMAL else 1 << 32
    for _ in range(129):
        out.append(weight)
        weight, ratio = weight * ratio >> 32, ratio * square >> 32
    return np.array(out, np.int64)
