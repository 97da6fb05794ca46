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
