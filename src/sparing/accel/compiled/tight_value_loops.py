"""What `wire.tight_values` writes of int8 codes, in one compiled call: the same ways, sizes and bytes.

Zeros are looked at once, many at a time: how often they occur follows from how often the others do.
"""

import numpy as np

from sparing.accel.compiled.bit_loops import byte, joined, length_of, packed_bits
from sparing.accel.compiled.compile import compiled
from sparing.accel.compiled.index_loops import split_places
from sparing.accel.compiled.tight_index_loops import (
    both_levels,
    counted,
    index_way,
    is_matrix,
    level_counts,
    lines_counted,
    nothing,
    octave_levels,
    plan_of,
    sizes_of_classes,
    written_symbols,
)
from sparing.wire import tight_values

PACKED, PLAIN, ROWS = tight_values.PACKED, tight_values.PLAIN, tight_values.ROWS
TOLD, KNOWN, SPARSE = tight_values.TOLD, tight_values.KNOWN, tight_values.SPARSE
SMALL, SELDOM = tight_values.SMALL, 50


@compiled
def true_places(bits: np.ndarray) -> np.ndarray:
    """Where bytes are not zero. A place that is zero is written over by the next; where few are not, eight zeros are
    passed over at a time."""
    count, n, whole = 0, len(bits), 0
    for i in range(n):
        count += bits[i] != 0
    out, found = np.empty(count + 1, np.int64), 0
    if SELDOM * count < n:
        words = bits[: n // 8 * 8].view(np.int64)
        for w in range(len(words)):
            if words[w]:
                for i in range(8 * w, 8 * w + 8):
                    out[found] = i
                    found += bits[i] != 0
        whole = 8 * len(words)
    for i in range(whole, n):
        out[found] = i
        found += bits[i] != 0
    return out[:count]


@compiled
def zigzag_of(codes: np.ndarray) -> np.ndarray:
    """`tight_values.zigzag`."""
    out = np.empty(len(codes), np.uint8)
    for i in range(len(codes)):
        out[i] = np.uint8((codes[i] << 1 ^ codes[i] >> 7) & 255)
    return out


@compiled
def narrowest(codes: np.ndarray) -> int:
    """`tight_values.narrowest`."""
    high, low = 0, 0
    for code in codes:
        high, low = max(high, code), min(low, code)
    return length_of(max(high, ~low)) + 1


@compiled
def written_packed(codes: np.ndarray, width: int) -> np.ndarray:
    """`tight_values.write_packed`."""
    numbers = np.empty(len(codes), np.uint8)
    for i in range(len(codes)):
        numbers[i] = codes[i] & (1 << width) - 1
    return joined(joined(byte(PACKED), byte(width)), packed_bits(numbers, width))


@compiled
def has_rows(u: int, columns: int) -> bool:
    """`tight_values.has_rows`; no columns: 0."""
    return columns > 0 and columns < u <= 256 * columns and u % columns == 0


@compiled
def may_be_sparse(zeros: int, n: int) -> bool:
    return zeros > 0 and (n <= SMALL or 2 * zeros > n)


@compiled
def shorter(exact: int, codes: np.ndarray, width: int, out: np.ndarray) -> np.ndarray:
    """What was written, or the packed codes, whose size was exact."""
    return out if 0 < len(out) <= exact else written_packed(codes, width)


# -------------------------------------------------------------------------------------------------- of kept positions


@compiled
def classes_of_places(row: np.ndarray, column: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """`levels.class_of_kept`."""
    by_row, by_column = lines_counted(row, column, rows, columns)
    heights, widths = octave_levels(by_row, True), octave_levels(by_column, True)
    out = np.empty(len(row), np.uint8)
    for i in range(len(row)):
        out[i] = heights[row[i]] + widths[column[i]]
    return out


@compiled
def kept_way(codes: np.ndarray, places: np.ndarray, u: int, columns: int) -> tuple[int, np.ndarray]:
    """Codes at kept places of u positions, in any way but as sparse ones: the size, nearly, and what is written."""
    n, width, symbols = len(codes), narrowest(codes), zigzag_of(codes)
    exact = 2 + (n * width + 7) // 8
    best, code, contexts = exact, PACKED, nothing()
    plan = plan_of(counted(symbols, nothing()), n)
    if 1 + plan[5] < best:
        best, code = 1 + plan[5], PLAIN
    row, column = split_places(places, max(columns, 1))
    if has_rows(u, columns):
        by_row = row.astype(np.uint8)
        tried = plan_of(counted(symbols, by_row), n)
        if 1 + tried[5] < best:
            best, code, contexts, plan = 1 + tried[5], ROWS, by_row, tried
    if is_matrix(u, columns):
        by_class = classes_of_places(row, column, u // columns, columns)
        tried = plan_of(counted(symbols, by_class), n)
        if 1 + tried[5] < best:
            best, code, contexts, plan = 1 + tried[5], KNOWN, by_class, tried
    out = nothing()
    if code != PACKED:
        out = joined(byte(code), written_symbols(symbols, contexts, plan))
    return best, shorter(exact, codes, width, out)


@compiled
def sparse_way(codes: np.ndarray, alive: np.ndarray, columns: int) -> tuple[int, np.ndarray]:
    """`tight_values._sparse_way`: places of what is not zero, and that."""
    size, where = index_way(alive, len(codes), columns)
    rest, values = kept_way(codes[alive], alive, len(codes), columns)
    return 1 + size + rest, joined(joined(byte(SPARSE), where), values)


@compiled
def written_kept(codes: np.ndarray, places: np.ndarray, u: int, columns: int) -> np.ndarray:
    """`tight_values.encode_tight_values` of codes at kept places, zeros among them or not."""
    best, out = kept_way(codes, places, u, columns)
    alive = true_places(codes)
    if may_be_sparse(len(codes) - len(alive), len(codes)):
        size, tried = sparse_way(codes, alive, columns * 0)
        if size < best:
            width = narrowest(codes)
            return shorter(2 + (len(codes) * width + 7) // 8, codes, width, tried)
    return out


# ------------------------------------------------------------------------------------------------- of whole tensors


@compiled
def with_zeros(histograms: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Contexts of these sizes, in which what was not counted is zero."""
    for context in range(len(histograms)):
        histograms[context, 0] += sizes[context] - histograms[context].sum()
    return histograms


@compiled
def counted_by_row(symbols: np.ndarray, row: np.ndarray, n: int, columns: int) -> np.ndarray:
    """How often each symbol occurs in each row of n codes; those given are not zero, and lie in these rows."""
    out = np.zeros((n // columns, 256), np.int64)
    for i in range(len(symbols)):
        out[row[i], symbols[i]] += 1
    return with_zeros(out, np.full(n // columns, columns))


@compiled
def levels_of_sums(
    symbols: np.ndarray, row: np.ndarray, column: np.ndarray, rows: int, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Levels of rows and columns, by how large the codes in them are."""
    by_row, by_column = np.zeros(rows, np.int64), np.zeros(columns, np.int64)
    for i in range(len(symbols)):
        size = (np.int64(symbols[i]) + 1) >> 1
        by_row[row[i]] += size
        by_column[column[i]] += size
    return octave_levels(by_row, True), octave_levels(by_column, True)


@compiled
def counted_by_class(
    symbols: np.ndarray, row: np.ndarray, column: np.ndarray, rows: np.ndarray, levels: np.ndarray
) -> np.ndarray:
    """The same in the class of every position; those in a row or a column of zeros have class 0."""
    sizes = sizes_of_classes(level_counts(rows), level_counts(levels))
    sizes[0] = len(rows) * len(levels) - sizes.sum()
    last = 0
    for kind in range(len(sizes)):
        last = kind if sizes[kind] else last
    out = np.zeros((last + 1, 256), np.int64)
    for i in range(len(symbols)):
        out[rows[row[i]] + levels[column[i]], symbols[i]] += 1
    return with_zeros(out, sizes)


@compiled
def every_class(rows: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """`levels.class_of`."""
    out = np.zeros(len(rows) * len(levels), np.uint8)
    for i in range(len(rows)):
        if rows[i]:
            for j in range(len(levels)):
                out[i * len(levels) + j] = rows[i] + levels[j] if levels[j] else 0
    return out


@compiled
def every_row(n: int, columns: int) -> np.ndarray:
    out = np.empty(n, np.uint8)
    for row in range(n // columns):
        out[row * columns : (row + 1) * columns] = row
    return out


@compiled
def written_whole(codes: np.ndarray, columns: int) -> np.ndarray:
    """`tight_values.encode_tight_values` of all codes of a tensor; no columns: 0."""
    n, alive = len(codes), true_places(codes)
    sent, zeros = codes[alive], len(codes) - len(alive)
    symbols, width = zigzag_of(sent), narrowest(sent)
    exact = 2 + (n * width + 7) // 8
    best, code = exact, PACKED
    plan = plan_of(with_zeros(counted(symbols, nothing()), np.full(1, n)), n)
    if 1 + plan[5] < best:
        best, code = 1 + plan[5], PLAIN
    row, column = split_places(alive, max(columns, 1))
    if has_rows(n, columns):
        tried = plan_of(counted_by_row(symbols, row, n, columns), n)
        if 1 + tried[5] < best:
            best, code, plan = 1 + tried[5], ROWS, tried
    rows, levels, told = nothing(), nothing(), plan
    if is_matrix(n, columns) and (n <= SMALL or 32 * zeros < 31 * n):
        rows, levels = levels_of_sums(symbols, row, column, n // columns, columns)
        sides, side = both_levels(rows, levels)
        told = plan_of(counted(sides, side), len(sides))
        tried = plan_of(counted_by_class(symbols, row, column, rows, levels), n)
        if told[5] + 1 + tried[5] < best:
            best, code, plan = told[5] + 1 + tried[5], TOLD, tried
    if may_be_sparse(zeros, n):
        size, out = sparse_way(codes, alive, columns)
        if size < best:
            return shorter(exact, codes, width, out)
    if code == PACKED:
        return written_packed(codes, width)
    contexts, head = nothing(), byte(code)
    if code == ROWS:
        contexts = every_row(n, columns)
    if code == TOLD:
        contexts = every_class(rows, levels)
        sides, side = both_levels(rows, levels)
        head = joined(head, written_symbols(sides, side, told))
    return shorter(exact, codes, width, joined(head, written_symbols(zigzag_of(codes), contexts, plan)))


# ------------------------------------------------------------------------------------------------------ many clients


@compiled
def sizes_of_rows(
    codes: np.ndarray,
    scope: np.ndarray,
    keep: np.ndarray,
    told: bool,
    columns: int,
    first: int,
    last: int,
    values: np.ndarray,
    indices: np.ndarray,
) -> None:
    """Bytes of the values and of the indices of rows first .. last of `[K, n]`, without those that say their codes.

    `scope` and `keep` are masks `[K, n]`, `[1, n]`, or `[0, n]` where there is none; `codes` may be one row for all.
    """
    n = codes.shape[1]
    for k in range(first, last):
        mine = codes[k if len(codes) > 1 else 0]
        values[k], indices[k] = -1, 0
        if len(scope) + len(keep) == 0:
            values[k] += len(written_whole(mine, columns))
            continue
        if len(scope):
            places = true_places(scope[k if len(scope) > 1 else 0])
            if told:
                indices[k] += len(index_way(places, n, columns)[1]) - 1
            if len(keep):
                among = true_places(keep[k if len(keep) > 1 else 0][places])
                indices[k] += len(index_way(among, len(places), columns * 0)[1]) - 1
                places = places[among]
        else:
            places = true_places(keep[k if len(keep) > 1 else 0])
            indices[k] += len(index_way(places, n, columns)[1]) - 1
        values[k] += len(written_kept(mine[places], places, n, columns))
