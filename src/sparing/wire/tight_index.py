"""Which positions of a universe are kept, in the fewest bytes we know: what tight leaves write as an index.

    0 to 3     as `index.py` writes them
    4 gaps     how many positions were skipped before each kept one, entropy-coded
    5 classes  the same class by class (`levels.py`), the universe being a matrix

Kept positions cluster: some rows and columns of a matrix hold most of them.

    >>> bits = np.zeros(1000, dtype=bool)
    >>> bits[[3, 500]] = True
    >>> b"".join(encode_tight_index(bits, None)).hex()
    '030702033811'
"""

from collections.abc import Callable, Iterator

import numpy as np

from sparing.core.operation import operation
from sparing.wire import index, rans
from sparing.wire.frequencies import FINE, log2
from sparing.wire.index import Reader, packed_size, rice_size, varint
from sparing.wire.levels import (
    LEVELS,
    class_counts,
    class_ends,
    class_numbers,
    class_positions,
    class_sizes,
    half_octaves,
    is_matrix,
    level_grid,
    levels_way,
    octaves,
    read_levels,
    rows_and_columns,
)

GAPS, CLASSES = 4, 5
BLOCK = 1 << 16
"""Gaps whose low bits are written together."""
LOG_E = 5909
"""log2 of e in 4096ths."""


Way = tuple[int, Callable[[], list[bytes]]]
"""Bytes in all, nearly, and the writing."""


@operation
def encode_tight_index(bits: np.ndarray, columns: int | None) -> list[bytes]:
    """Bool `[u]` as the code's byte and what follows; `columns` is a row's length where the universe is a matrix."""
    return tight_index_way(bits, columns)[1]()


def tight_index_way(bits: np.ndarray, columns: int | None) -> Way:
    places = np.flatnonzero(bits)
    plain = index.plan_index(bits, places)
    size = 1
    if plain.code == index.RICE:
        size += rice_size(plain.kept, plain.low, plain.quotients)
    if plain.code == index.BITMAP:
        size += packed_size(len(bits), 1)
    tried: list[Way] = []
    if size > 1:
        tried.append(gaps_way([places], bytes([GAPS])))
        if columns and is_matrix(len(bits), columns):
            tried.append(classes_way(places, len(bits) // columns, columns))
    return shortest_way((size, lambda: index.encode_index(bits)), tried)


def shortest_way(exact: Way, others: list[Way]) -> Way:
    """As far as sizes are known; once written, it is no longer than the one whose size is exact."""
    best = min((exact, *others), key=lambda one: one[0])

    def write() -> list[bytes]:
        pieces = best[1]()
        return pieces if sum(map(len, pieces)) <= exact[0] else exact[1]()

    return best[0], write


def decode_tight_index(reader: Reader, u: int, columns: int | None) -> np.ndarray:
    """Bool `[u]` from the reader."""
    start = reader.at
    code = reader.byte("index code")
    if code < GAPS:
        reader.at = start
        return index.decode_index(reader, u)
    if code == CLASSES and columns and is_matrix(u, columns):
        return read_classes(reader, u // columns, columns)
    if code != GAPS:
        reader.refuse(f"index code {code} for {u} positions in {columns or 'no'} columns", start)
    pieces = read_gaps(reader, [u])
    bits = np.zeros(u, bool)
    for _, places in pieces:
        bits[places] = True
    return bits


# -------------------------------------------------------------------------------------------------------------- gaps


def gaps_way(numbers: list[np.ndarray], head: bytes) -> Way:
    """By class: counts; the gaps of all, in the context of their class; the low bits of long ones, in blocks."""
    head += b"".join(varint(len(some)) for some in numbers)
    gaps, symbols = gaps_of(numbers)
    contexts = contexts_of([len(some) for some in numbers])
    plan = rans.plan_rans(symbols, contexts)

    def write() -> list[bytes]:
        low = [write_low(gaps[at], WIDTHS[symbols[at]]) for at in rans._block_slices(len(gaps), BLOCK)]
        return [head, rans.write_rans(plan, symbols, contexts), *low]

    return len(head) + plan.size + packed_size(int(WIDTHS[symbols].sum()), 1), write


def gaps_of(numbers: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """How many numbers were skipped before each, class by class, and their symbols."""
    gaps = np.concatenate([np.diff(some, prepend=-1) - 1 for some in numbers])
    return gaps, symbols_of(gaps)


def read_gaps(reader: Reader, sizes: list[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Numbers in order, a stretch at a time, with the place of their class in the list."""
    start = reader.at
    counts = [reader.varint("count") for _ in sizes]
    if any(n > u for n, u in zip(counts, sizes, strict=True)):
        reader.refuse(f"{counts} positions kept in classes of {sizes}", start)
    symbols = rans.decode_rans(reader, sum(counts), contexts_of(counts))
    return pieces_of(reader, symbols, counts, sizes)


def pieces_of(
    reader: Reader, symbols: np.ndarray, counts: list[int], sizes: list[int]
) -> Iterator[tuple[int, np.ndarray]]:
    number = last = -1
    left = 0
    for at in rans._block_slices(len(symbols), BLOCK):
        start = reader.at
        if STARTS[symbols[at].max()] >= max(sizes):
            reader.refuse(f"a gap of {STARTS[symbols[at].max()]} or more among {max(sizes)} positions", start)
        gaps = read_low(reader, symbols[at])
        while len(gaps):
            while not left:
                number, left, last = number + 1, counts[number + 1], -1
            some = np.cumsum(gaps[:left] + 1) + last
            if some[-1] >= sizes[number]:
                reader.refuse(f"position {some[-1]} of {sizes[number]}", start)
            yield number, some
            gaps, left, last = gaps[left:], left - len(some), int(some[-1])


def contexts_of(counts: list[int]) -> np.ndarray | None:
    return np.repeat(np.arange(len(counts), dtype=np.uint8), counts) if len(counts) > 1 else None


def symbols_of(gaps: np.ndarray) -> np.ndarray:
    """0 to 15 as they are, then four symbols an octave; what a symbol leaves open are low bits.

    >>> symbols_of(np.array([3, 15, 16, 19, 20, 32]))
    array([ 3, 15, 16, 16, 17, 20], dtype=uint8)
    """
    octave = np.frexp(gaps.astype(np.float64))[1].astype(np.int64) - 1
    return np.where(gaps < 16, gaps, 4 * octave + (gaps >> np.maximum(octave - 2, 0) & 3)).astype(np.uint8)


STARTS = np.array([s if s < 16 else 4 + s % 4 << s // 4 - 2 for s in range(240)] + [1 << 60] * 16, np.int64)
"""The smallest gap of every symbol."""
WIDTHS = np.array([s // 4 - 2 if s >= 16 else 0 for s in range(256)], np.int64)
"""How many low bits of a gap its symbol leaves open."""


def write_low(gaps: np.ndarray, widths: np.ndarray) -> bytes:
    """Bit 0 of all gaps that have it open, then bit 1, and so on."""
    planes = [np.zeros(0, np.int64)]
    for bit in range(int(widths.max(initial=0))):
        gaps, widths = gaps[widths > bit], widths[widths > bit]
        planes.append(gaps >> bit & 1)
    return np.packbits(np.concatenate(planes).astype(bool), bitorder="little").tobytes()


def read_low(reader: Reader, symbols: np.ndarray) -> np.ndarray:
    """The gaps, their low bits read."""
    gaps, widths = STARTS[symbols], WIDTHS[symbols]
    total, at = int(widths.sum()), 0
    raw = np.unpackbits(np.frombuffer(reader.packed(total, 1, "low bits"), np.uint8), count=total, bitorder="little")
    some = np.arange(len(gaps), dtype=np.int64)
    for bit in range(int(widths.max(initial=0))):
        some = some[widths[some] > bit]
        gaps[some] |= raw[at : at + len(some)].astype(np.int64) << bit
        at += len(some)
    return gaps


# ----------------------------------------------------------------------------------------------------------- classes


def classes_way(places: np.ndarray, rows: int, columns: int, level: Callable | None = None) -> Way:
    """Levels by how many are kept, in octaves or halves of them: by what perfect codes would take."""
    row, column = rows_and_columns(places, columns)
    counts = np.bincount(row, minlength=rows), np.bincount(column, minlength=columns)
    tried = [(how(counts[0]), how(counts[1])) for how in ((octaves, half_octaves) if level is None else (level,))]
    g = level_grid(*min(tried, key=lambda levels: _guessed_bytes(*levels, row, column)))
    size, write_levels = levels_way(g.rows, g.columns)
    gaps, write = gaps_way(class_numbers(g, row, column), b"")
    return 1 + size + gaps, lambda: [bytes([CLASSES]), write_levels(), *write()]


def _guessed_bytes(rows: np.ndarray, columns: np.ndarray, row: np.ndarray, column: np.ndarray) -> int:
    """What levels and positions should take, in 4096ths of a bit; a class is given five bytes."""
    heights, widths = np.bincount(rows, minlength=LEVELS), np.bincount(columns, minlength=LEVELS)
    price = _entropy_bits(heights) + _entropy_bits(widths)
    heights[0] = widths[0] = 0
    sizes, kept = class_sizes(heights, widths), class_counts(rows, columns, row, column)
    some = np.minimum(kept, sizes - kept)
    n, u = some[some > 0], sizes[some > 0]
    return price + int((n * (log2(u) - log2(n) + LOG_E - LOG_E * n // (2 * u))).sum()) + (len(n) * 5 << FINE + 3)


def _entropy_bits(histogram: np.ndarray) -> int:
    some = histogram[histogram > 0]
    return int((some * (log2(some.sum(keepdims=True)) - log2(some))).sum())


def read_classes(reader: Reader, rows: int, columns: int) -> np.ndarray:
    g = level_grid(*read_levels(reader, rows, columns))
    bits = np.zeros(rows * columns, bool)
    last, upto = -1, bits
    for number, some in read_gaps(reader, g.sizes):
        if number != last:
            last, upto = number, class_ends(g, g.classes[number])
        row, column = class_positions(g, g.classes[number], upto, some)
        bits[row * columns + column] = True
    return bits
