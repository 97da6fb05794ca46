"""What `wire.tight_index` writes of kept positions, in one compiled call: the same ways, sizes and bytes."""

import numpy as np

from sparing.accel.compiled.bit_loops import (
    byte,
    joined,
    length_of,
    packed_bits,
    set_bits,
    varint,
    varint_size,
    varints,
)
from sparing.accel.compiled.compile import compiled
from sparing.accel.compiled.index_loops import (
    class_counts,
    gap_symbols,
    gaps_between,
    numbers_in_classes,
    quotient_sum,
    split_places,
)
from sparing.accel.compiled.rans_loops import tables_of, write_lanes, write_one_state
from sparing.wire import frequencies, index, rans, tight_index
from sparing.wire.frequencies import FINE
from sparing.wire.levels import LEVELS

ALL, NONE, BITMAP, RICE = index.ALL, index.NONE, index.BITMAP, index.RICE
GAPS, CLASSES, BLOCK, LOG_E = tight_index.GAPS, tight_index.CLASSES, tight_index.BLOCK, tight_index.LOG_E
WIDTHS, LOGS = tight_index.WIDTHS, frequencies.LOGS
FEW, FEWEST, MOST = rans.FEW, rans.FEWEST, rans.MOST


@compiled
def nothing() -> np.ndarray:
    """No bytes, or no contexts."""
    return np.zeros(0, np.uint8)


# ----------------------------------------------------------------------------------------------------------- symbols


@compiled
def plan_of(histograms: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int, int]:
    """`rans.plan_rans` of n symbols by how often each occurs in each context."""
    bits = min(max(length_of(n), 8), 13)
    if not n:
        return np.zeros(0, np.uint8), np.zeros((0, 256), np.int64), np.zeros(1, np.int64), bits, 0, 0
    heads, tables, rows, price = tables_of(histograms, bits)
    share, body, size, lanes = price >> FINE + 11, price >> FINE + 3, len(heads), 0
    wanted = min(max(share if share < 32 else 2 * share, n >> 13), MOST)
    if wanted >= FEWEST and n > FEW:
        lanes = wanted
    if price:
        size += body + (2 * lanes if lanes else varint_size(body))
    return heads, tables, rows, bits, lanes, size


@compiled
def counted(symbols: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """How often each symbol occurs in each context; in one, where `contexts` is empty."""
    count = 1
    for context in contexts:
        count = max(count, context + 1)
    out = np.zeros((count, 256), np.int64)
    if len(contexts):
        for i in range(len(symbols)):
            out[contexts[i], symbols[i]] += 1
    else:
        for symbol in symbols:
            out[0, symbol] += 1
    return out


@compiled
def written_symbols(
    symbols: np.ndarray,
    contexts: np.ndarray,
    plan: tuple[np.ndarray, np.ndarray, np.ndarray, int, int, int],
) -> np.ndarray:
    """`rans.write_rans`."""
    heads, tables, rows, bits, lanes, _ = plan
    certain = True
    for t in range(len(tables)):
        certain = certain and tables[t].max() == 1 << bits
    if certain:
        return heads
    out = joined(heads, varint(lanes)) if len(symbols) > FEW else heads
    if lanes:
        states, words = write_lanes(symbols, contexts, tables, rows, bits, lanes)
        return joined(joined(out, states.view(np.uint8)), words.view(np.uint8))
    data = write_one_state(symbols, contexts, tables, rows, bits)
    return joined(joined(out, varint(len(data))), data)


# -------------------------------------------------------------------------------------------------------------- gaps


@compiled
def gap_contexts(counts: np.ndarray) -> np.ndarray:
    """`tight_index.contexts_of`, empty where there is one class only."""
    if len(counts) < 2:
        return nothing()
    out, at = np.empty(counts.sum(), np.uint8), 0
    for kind in range(len(counts)):
        out[at : at + counts[kind]] = kind
        at += counts[kind]
    return out


@compiled
def low_bits_of(gaps: np.ndarray, symbols: np.ndarray) -> np.ndarray:
    """`tight_index.write_low`, a block after the other."""
    total = 0
    for symbol in symbols:
        total += WIDTHS[symbol]
    out, used = np.zeros(total // 8 + len(gaps) // BLOCK + 2, np.uint8), 0
    open_gaps, widths = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    for begin in range(0, len(gaps), BLOCK):
        left = 0
        for i in range(begin, min(begin + BLOCK, len(gaps))):
            if WIDTHS[symbols[i]]:
                open_gaps[left], widths[left] = gaps[i], WIDTHS[symbols[i]]
                left += 1
        at, bit = 0, 0
        while left:
            kept = 0
            for i in range(left):
                gap, width = open_gaps[i], widths[i]
                out[used + (at >> 3)] |= np.uint8((gap >> bit & 1) << (at & 7))
                at += 1
                if width > bit + 1:
                    open_gaps[kept], widths[kept] = gap, width
                    kept += 1
            left, bit = kept, bit + 1
        used += (at + 7) >> 3
    return out[:used]


@compiled
def total_width(symbols: np.ndarray) -> int:
    total = 0
    for i in range(len(symbols)):
        total += int(WIDTHS[symbols[i]])
    return total


# ----------------------------------------------------------------------------------------------------------- classes


@compiled
def octave_levels(counts: np.ndarray, halves: bool) -> np.ndarray:
    """`levels.octaves`, or `levels.half_octaves`."""
    out = np.empty(len(counts), np.uint8)
    for i in range(len(counts)):
        count = min(counts[i], (1 << 31) - 1)
        level = length_of(count)
        if halves:
            twice = 2 * level
            level = max(twice - (1 if count * count < 1 << max(twice - 1, 0) else 0), 0)
        out[i] = level
    return out


@compiled
def level_counts(levels: np.ndarray) -> np.ndarray:
    out = np.zeros(LEVELS, np.int64)
    for level in levels:
        out[level] += 1
    return out


@compiled
def sizes_of_classes(heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """`levels.class_sizes` of how many rows and columns have each level; level 0 has no class."""
    out = np.zeros(2 * LEVELS - 1, np.int64)
    for height in range(1, LEVELS):
        if heights[height]:
            for width in range(1, LEVELS):
                out[height + width] += heights[height] * widths[width]
    return out


@compiled
def log2_of(x: int) -> int:
    """`frequencies.log2`."""
    length = length_of(x)
    leading = x >> length - 11 if length > 11 else x << 11 - length
    return (length - 1 << FINE) + LOGS[leading - 1024]


@compiled
def entropy_bits(histogram: np.ndarray) -> int:
    total, bits = histogram.sum(), 0
    for i in range(len(histogram)):
        count = int(histogram[i])
        if count:
            bits += count * (log2_of(total) - log2_of(count))
    return bits


@compiled
def guessed_bits(rows: np.ndarray, columns: np.ndarray, row: np.ndarray, column: np.ndarray) -> int:
    """`tight_index._guessed_bytes`."""
    heights, widths = level_counts(rows), level_counts(columns)
    price = entropy_bits(heights) + entropy_bits(widths)
    sizes, kept = sizes_of_classes(heights, widths), class_counts(rows, columns, row, column)
    for kind in range(len(sizes)):
        u, n = sizes[kind], min(kept[kind], sizes[kind] - kept[kind])
        if n > 0:
            price += n * (log2_of(u) - log2_of(n) + LOG_E - LOG_E * n // (2 * u)) + (5 << FINE + 3)
    return price


@compiled
def level_ranks(levels: np.ndarray) -> np.ndarray:
    """`levels.column_ranks`."""
    out, seen = np.empty(len(levels), np.int64), np.zeros(LEVELS, np.int64)
    for i in range(len(levels)):
        out[i] = seen[levels[i]]
        seen[levels[i]] += 1
    return out


@compiled
def is_matrix(u: int, columns: int) -> bool:
    """`levels.is_matrix`; no columns: 0."""
    if columns < 8 or u < 8 * columns or u % columns:
        return False
    return 16 * (columns + u // columns) <= u + (1 << 14)


@compiled
def both_levels(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `levels.levels_way` writes, and the contexts: 0 for rows, 1 for columns."""
    contexts = np.zeros(len(rows) + len(columns), np.uint8)
    contexts[len(rows) :] = 1
    return joined(rows, columns), contexts


@compiled
def lines_counted(row: np.ndarray, column: np.ndarray, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """How many positions lie in every row and in every column."""
    by_row, by_column = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    for i in range(len(row)):
        by_row[row[i]] += 1
        by_column[column[i]] += 1
    return by_row, by_column


@compiled
def places_by_class(places: np.ndarray, u: int, columns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Levels of rows and columns, kept positions of each class, and their numbers class by class."""
    row, column = split_places(places, columns)
    by_row, by_column = lines_counted(row, column, u // columns, columns)
    rows, levels = octave_levels(by_row, False), octave_levels(by_column, False)
    finer, narrow = octave_levels(by_row, True), octave_levels(by_column, True)
    if guessed_bits(finer, narrow, row, column) < guessed_bits(rows, levels, row, column):
        rows, levels = finer, narrow
    widths = level_counts(levels)
    sizes = sizes_of_classes(level_counts(rows), widths)
    kept, ranks = class_counts(rows, levels, row, column), level_ranks(levels)
    widths[0] = 0
    return rows, levels, kept[sizes > 0], numbers_in_classes(rows, levels, widths, ranks, row, column, kept)


# -------------------------------------------------------------------------------------------------------------- ways


@compiled
def written_rice(places: np.ndarray, low: int, quotients: int) -> np.ndarray:
    """`index._write_rice` behind its code."""
    count, wide = len(places), low % 8
    gaps = gaps_between(places, np.full(1, count))
    out = joined(joined(byte(RICE), byte(low)), varint(count))
    for shift in range(0, low - 7, 8):
        out = joined(out, (gaps >> shift & 255).astype(np.uint8))
    if wide:
        out = joined(out, packed_bits((gaps & (1 << low) - 1) >> low - wide, wide))
    unary, end = np.zeros((count + quotients + 7) // 8, np.uint8), -1
    for i in range(count):
        end += (gaps[i] >> low) + 1
        unary[end >> 3] |= np.uint8(1 << (end & 7))
    return joined(out, unary)


@compiled
def index_way(places: np.ndarray, u: int, columns: int) -> tuple[int, np.ndarray]:
    """`tight_index.tight_index_way` of kept places of u positions: its size, nearly, and what it writes."""
    count = len(places)
    if count == u or count == 0:
        return 1, byte(ALL if count == u else NONE)
    skipped = places[-1] + 1 - count
    low = length_of((2 * skipped + count) // (4 * count))
    quotients = quotient_sum(places, low) if low else skipped
    lows = low // 8 * count + (count * (low % 8) + 7) // 8
    rice, bitmap = 1 + varint_size(count) + lows + (count + quotients + 7) // 8, (u + 7) // 8
    exact = 1 + min(rice, bitmap)

    gaps = gaps_between(places, np.full(1, count))
    symbols = gap_symbols(gaps)
    plan = plan_of(counted(symbols, nothing()), count)
    best, code = exact, RICE
    size = 1 + varint_size(count) + plan[5] + (total_width(symbols) + 7) // 8
    if size < best:
        best, code = size, GAPS
    out = nothing()
    if is_matrix(u, columns):
        rows, levels, counts, numbers = places_by_class(places, u, columns)
        sides, side = both_levels(rows, levels)
        told = plan_of(counted(sides, side), len(sides))
        apart = gaps_between(numbers, counts.cumsum())
        marks, contexts = gap_symbols(apart), gap_contexts(counts)
        inner = plan_of(counted(marks, contexts), count)
        heads = varints(counts)
        size = 1 + told[5] + len(heads) + inner[5] + (total_width(marks) + 7) // 8
        if size < best:
            best, code = size, CLASSES
            out = joined(joined(byte(CLASSES), written_symbols(sides, side, told)), heads)
            out = joined(joined(out, written_symbols(marks, contexts, inner)), low_bits_of(apart, marks))
    if code == GAPS:
        out = joined(joined(byte(GAPS), varint(count)), written_symbols(symbols, nothing(), plan))
        out = joined(out, low_bits_of(gaps, symbols))
    if code != RICE and len(out) <= exact:
        return best, out
    if rice < bitmap:
        return best, written_rice(places, low, quotients)
    out = np.zeros(1 + bitmap, np.uint8)
    out[0] = BITMAP
    set_bits(out[1:], places)
    return best, out
