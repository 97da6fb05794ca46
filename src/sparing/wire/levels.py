"""Matrices whose rows and columns have levels: 0 where nothing is, higher where more is, as the sender sees fit.

A position's class is the level of its row plus the level of its column; where one of the two is 0, it has none. Within
a class, positions are numbered in C order. Neither end ever sorts a matrix: a position's number is how many of its
class lie in the rows before, and how many columns of its column's level lie before it.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from sparing.core.operation import operation
from sparing.wire import rans
from sparing.wire.index import Reader

LEVELS = 64
"""Levels are below it, so that there are few classes."""


class LevelGrid(NamedTuple):
    rows: np.ndarray  # level of each row, uint8
    columns: np.ndarray
    order: np.ndarray  # the columns, sorted by level
    first: np.ndarray  # where each level begins in `order`
    widths: np.ndarray  # columns of each level, 0 for level 0
    classes: list[int]  # that have positions
    sizes: list[int]  # of these classes


def level_grid(rows: np.ndarray, columns: np.ndarray) -> LevelGrid:
    widths, heights = np.bincount(columns, minlength=LEVELS), np.bincount(rows, minlength=LEVELS)
    first = np.cumsum(widths) - widths
    widths[0] = heights[0] = 0
    sizes = class_sizes(heights, widths)
    classes = np.flatnonzero(sizes)
    return LevelGrid(
        rows, columns, np.argsort(columns, kind="stable"), first, widths, classes.tolist(), sizes[classes].tolist()
    )


def class_sizes(heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """How many positions every class has, `[127]`."""
    return np.convolve(heights, widths)


def is_matrix(u: int, columns: int | None) -> bool:
    """Whether u positions in so many columns are worth levels: rows and columns must not outweigh the positions."""
    if columns is None or columns < 8 or u < 8 * columns or u % columns:
        return False
    return 16 * (columns + u // columns) <= u + (1 << 14)


def half_octaves(counts: np.ndarray) -> np.ndarray:
    """Levels: the bit length of the square.

    >>> half_octaves(np.array([0, 1, 2, 3, 4]))
    array([0, 1, 3, 4, 5], dtype=uint8)
    """
    counts = np.minimum(counts, (1 << 31) - 1)
    twice = 2 * octaves(counts).astype(np.int64)
    return np.maximum(twice - (counts * counts < 1 << np.maximum(twice - 1, 0)), 0).astype(np.uint8)


def octaves(counts: np.ndarray) -> np.ndarray:
    """Levels: the bit length."""
    return np.frexp(counts.astype(np.float64))[1].astype(np.uint8)


def class_of(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Of every position of a matrix, 0 for none, uint8 `[u]`."""
    both = rows[:, None] + columns
    both *= (rows > 0)[:, None]
    both *= columns > 0
    return both.reshape(-1)


@operation
def class_of_kept(bits: np.ndarray, columns: int) -> np.ndarray:
    """Of every kept position of bool `[u]`, by how many are kept in its row and in its column, in half octaves."""
    few = 8 * np.count_nonzero(bits) <= len(bits)  # else they take too much memory to be found only once
    found = [*kept_in(bits, columns, len(bits))] if few else None
    by_row, by_column = np.zeros(len(bits) // columns, np.int64), np.zeros(columns, np.int64)
    for row, column in found or kept_in(bits, columns):
        tally(by_row, row)
        tally(by_column, column)
    rows, levels = half_octaves(by_row), half_octaves(by_column)
    return np.concatenate([rows[row] + levels[column] for row, column in found or kept_in(bits, columns)])


def rows_and_columns(places: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Of positions in C order."""
    row = places // columns
    return row, places - row * columns


def row_of(n: int, columns: int, kept: np.ndarray | None) -> np.ndarray:
    """The row of each of n positions, or of those that are kept, uint8."""
    if kept is None:
        return np.repeat(np.arange(n // columns, dtype=np.uint8), columns)
    each = np.count_nonzero(kept.reshape(-1, columns), axis=1)
    return np.repeat(np.arange(len(each), dtype=np.uint8), each)


def tally(counts: np.ndarray, places: np.ndarray) -> None:
    """Count every place, in a time that does not grow with how many counts there are."""
    first, last = int(places.min(initial=len(counts))), int(places.max(initial=0))
    if last - first < len(places):
        counts[first : last + 1] += np.bincount(places - first)
    else:
        np.add.at(counts, places, 1)


def kept_in(bits: np.ndarray, columns: int, block: int = 1 << 18) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and columns of the kept positions, a block at a time."""
    for at in rans._block_slices(len(bits), block):
        places = np.flatnonzero(bits[at])
        places += at.start
        yield rows_and_columns(places, columns)


def class_ends(g: LevelGrid, kind: int) -> np.ndarray:
    """How many positions of a class lie in the rows up to each, itself included."""
    widths = np.zeros(LEVELS, np.int64)
    levels = np.arange(max(1, kind - LEVELS + 1), min(kind, LEVELS), dtype=np.int64)
    widths[levels] = g.widths[kind - levels]
    found = widths[g.rows]
    return np.cumsum(found, out=found)


def class_counts(rows: np.ndarray, columns: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
    """How many of these positions every class has, `[127]`."""
    return np.bincount(rows[row] + columns[column], minlength=2 * LEVELS - 1)


def column_ranks(g: LevelGrid) -> np.ndarray:
    """How many columns of its level lie before each."""
    rank = np.empty(len(g.columns), np.int64)
    rank[g.order] = np.arange(len(rank), dtype=np.int64)
    return rank - g.first[g.columns]


def class_numbers(g: LevelGrid, row: np.ndarray, column: np.ndarray) -> list[np.ndarray]:
    """Positions, given in C order, by class: their numbers in each."""
    rank = column_ranks(g)
    kinds = g.rows[row] + g.columns[column]
    order = np.argsort(kinds, kind="stable")
    stops = np.cumsum(np.bincount(kinds, minlength=2 * LEVELS))
    out = []
    for kind in g.classes:
        some = order[stops[kind - 1] : stops[kind]]
        r = row[some]
        out.append(class_ends(g, kind)[r] - g.widths[kind - g.rows[r]] + rank[column[some]])
    return out


def class_positions(g: LevelGrid, kind: int, upto: np.ndarray, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the positions of one class with these numbers; `upto` are its `class_ends`."""
    row = np.searchsorted(upto, some, side="right")
    level = kind - g.rows[row].astype(np.int64)
    return row, g.order[g.first[level] + some - upto[row] + g.widths[level]]


# ------------------------------------------------------------------------------------------------- levels on the wire


def levels_way(rows: np.ndarray, columns: np.ndarray) -> tuple[int, Callable[[], bytes]]:
    """Those of the rows, then those of the columns: two contexts. Bytes in all, nearly, and the writing."""
    levels, contexts = np.concatenate([rows, columns]), side_levels(len(rows), len(columns))
    plan = rans.plan_rans(levels, contexts)
    return plan.size, lambda: rans.write_rans(plan, levels, contexts)


def read_levels(reader: Reader, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    start = reader.at
    levels = rans.decode_rans(reader, rows + columns, side_levels(rows, columns))
    if levels.max() >= LEVELS:
        reader.refuse(f"a level of {levels.max()}, at most {LEVELS - 1} are known", start)
    return levels[:rows], levels[rows:]


def side_levels(rows: int, columns: int) -> np.ndarray:
    return np.repeat(np.array([0, 1], np.uint8), [rows, columns])
