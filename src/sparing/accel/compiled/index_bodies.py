"""Kept positions and sizes of codes counted by compiled loops: bodies of `wire.index`, `levels`, `tight_values`."""

import numpy as np

from sparing.accel.compiled import index_loops
from sparing.wire.levels import half_octaves

compiled_quotient_sum = index_loops.quotient_sum
compiled_sums_of = index_loops.line_sums


def compiled_class_of_kept(bits: np.ndarray, columns: int) -> np.ndarray:
    """`levels.class_of_kept`."""
    by_row, by_column = index_loops.kept_in_lines(bits, columns)
    return index_loops.kept_classes(bits, half_octaves(by_row), half_octaves(by_column), int(by_row.sum()))
