"""The loops of tight indices: gaps, classes and their numbers, position by position."""

import numpy as np

from sparing.accel.compiled.compile import compiled
from sparing.wire.levels import LEVELS


@compiled
def gaps_between(places: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """How many numbers were skipped before each, class by class; a class ends before each stop."""
    out, begin = np.empty_like(places), 0
    for stop in stops:
        before = -1
        for i in range(begin, stop):
            out[i] = places[i] - before - 1
            before = places[i]
        begin = stop
    return out


@compiled
def gap_symbols(gaps: np.ndarray) -> np.ndarray:
    """`tight_index.symbols_of`."""
    out = np.empty(len(gaps), np.uint8)
    for i in range(len(gaps)):
        gap = gaps[i]
        if gap < 16:
            out[i] = gap
        else:
            octave, rest = 4, gap >> 5
            while rest:
                octave, rest = octave + 1, rest >> 1
            out[i] = 4 * octave + (gap >> octave - 2 & 3)
    return out


@compiled
def quotient_sum(places: np.ndarray, low: int) -> int:
    """The sum of gap >> low."""
    before, out = -1, 0
    for place in places:
        out += place - before - 1 >> low
        before = place
    return out


@compiled
def class_counts(rows: np.ndarray, columns: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """How many of these positions each class has, `[127]`."""
    out = np.zeros(2 * LEVELS - 1, np.int64)
    for i in range(len(row)):
        out[rows[row[i]] + columns[column[i]]] += 1
    return out


@compiled
def numbers_in_classes(
    rows: np.ndarray,
    columns: np.ndarray,
    widths: np.ndarray,
    rank: np.ndarray,
    row: np.ndarray,
    column: np.ndarray,
    kept: np.ndarray,
) -> np.ndarray:
    """Positions, given in C order: their numbers in their classes, class by class; `kept` are the classes' counts.

    A position's number is how many of its class lie in the rows before, and the rank of its column in its level.
    """
    at = np.cumsum(kept) - kept
    out, before, done = np.empty(len(row), np.int64), np.zeros(2 * LEVELS, np.int64), 0
    for i in range(len(row)):
        while done < row[i]:
            if rows[done]:
                for level in range(1, LEVELS):
                    before[rows[done] + level] += widths[level]
            done += 1
        kind = rows[row[i]] + columns[column[i]]
        out[at[kind]] = before[kind] + rank[column[i]]
        at[kind] += 1
    return out


@compiled
def split_places(places: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of positions in C order."""
    row, column, here, begin = np.empty_like(places), np.empty_like(places), 0, 0
    for i in range(len(places)):
        if places[i] - begin >= columns:
            here = places[i] // columns
            begin = here * columns
        row[i], column[i] = here, places[i] - begin
    return row, column


@compiled
def kept_in_lines(bits: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """How many positions are kept in every row and in every column."""
    by_row, by_column = np.zeros(len(bits) // columns, np.int64), np.zeros(columns, np.int64)
    for row in range(len(by_row)):
        begin = row * columns
        for column in range(columns):
            by_column[column] += bits[begin + column]
            by_row[row] += bits[begin + column]
    return by_row, by_column


@compiled
def kept_classes(bits: np.ndarray, rows: np.ndarray, columns: np.ndarray, kept: int) -> np.ndarray:
    """Of every kept position, the level of its row plus that of its column; others are written over by the next."""
    out, found, wide = np.empty(kept + 1, np.uint8), 0, len(columns)
    for row in range(len(rows)):
        for column in range(wide):
            out[found] = rows[row] + columns[column]
            found += bits[row * wide + column]
    return out[:kept]


@compiled
def line_sums(symbols: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Sizes of codes in zigzag order, added up in every row and in every column."""
    by_row, by_column = np.zeros(len(symbols) // columns, np.int64), np.zeros(columns, np.int64)
    for row in range(len(by_row)):
        begin = row * columns
        for column in range(columns):
            size = (np.int64(symbols[begin + column]) + 1) >> 1
            by_column[column] += size
            by_row[row] += size
    return by_row, by_column
