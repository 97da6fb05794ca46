"""Tight indices by compiled loops: bodies of `wire.index`, `wire.levels` and `wire.tight_index`."""

import numpy as np

from sparing.accel.compiled import index_loops
from sparing.wire.levels import LevelGrid, column_ranks, half_octaves

compiled_quotient_sum = index_loops.quotient_sum
compiled_class_counts = index_loops.class_counts
compiled_rows_and_columns = index_loops.split_places
compiled_sums_of = index_loops.line_sums
compiled_nonzero_codes = index_loops.without_zeros


def compiled_class_of_kept(bits: np.ndarray, columns: int) -> np.ndarray:
    """`levels.class_of_kept`."""
    by_row, by_column = index_loops.kept_in_lines(bits, columns)
    return index_loops.kept_classes(bits, half_octaves(by_row), half_octaves(by_column), int(by_row.sum()))


def compiled_gaps_of(numbers: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`tight_index.gaps_of`."""
    stops = np.cumsum(np.array([len(some) for some in numbers], np.int64))
    gaps = index_loops.gaps_between(numbers[0] if len(numbers) == 1 else np.concatenate(numbers), stops)
    return gaps, index_loops.gap_symbols(gaps)


def compiled_class_numbers(g: LevelGrid, row: np.ndarray, column: np.ndarray) -> list[np.ndarray]:
    """`levels.class_numbers`."""
    kept = index_loops.class_counts(g.rows, g.columns, row, column)
    every = index_loops.numbers_in_classes(g.rows, g.columns, g.widths, column_ranks(g), row, column, kept)
    stops = np.cumsum(kept)
    return [every[stops[kind] - kept[kind] : stops[kind]] for kind in g.classes]
