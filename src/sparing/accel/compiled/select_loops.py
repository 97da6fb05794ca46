"""The largest magnitudes of rows: a sample says above which bound to look, digits of those there say where to cut.

Numbers are float32 seen as int32, so magnitudes without their sign are in order, NaN above all.
"""

import numpy as np

from sparing.accel.compiled.compile import compiled

SIZE, INFINITE = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
SAMPLE = 1 << 12
"""Numbers of a row that are looked at first."""
DIGIT = 11
"""Bits of a digit; the first has the eight of the exponent."""
DIGITS = 1 << DIGIT


@compiled
def largest_of_rows(
    bits: np.ndarray, count: np.ndarray, mask: np.ndarray, kept: np.ndarray, first: int, last: int
) -> bool:
    """Which entries are the `count_k` largest of row k, and these, if `kept` has columns; false where a cut is NaN."""
    n = bits.shape[1]
    above = np.empty(n, np.int32)
    seen = np.empty(DIGITS, np.int64)
    for k in range(first, last):
        row, wanted = bits[k], min(count[k], n)
        cut, ties = 1, n
        if wanted <= 0:
            mask[k, :] = 0
            kept[k, :] = 0
            continue
        if wanted < n:
            some = look_above(row, bound_of_sample(row, wanted, seen), above)
            if some < wanted:
                some = look_above(row, 0, above)
            cut, ties = cut_at(above, some, wanted, seen)
            if cut > INFINITE:
                return False
            if cut == 0:
                cut, ties = 1, n
        mark_row(row, cut, ties, mask[k], kept[k])
    return True


@compiled
def bound_of_sample(row: np.ndarray, wanted: int, seen: np.ndarray) -> int:
    """A magnitude above which there are probably somewhat more than are wanted."""
    n = len(row)
    step = n // SAMPLE | 1  # odd, lest it keep to a few columns of a matrix
    seen[:] = 0
    for i in range(0, n, step):
        seen[(row[i] & SIZE) >> 20] += 1
    hoped = 1.3 * wanted / step + 30
    digit = DIGITS - 1
    so_far = seen[digit]
    while so_far < hoped and digit > 0:
        digit -= 1
        so_far += seen[digit]
    return digit << 20


@compiled
def look_above(row: np.ndarray, bound: int, above: np.ndarray) -> int:
    """The magnitudes that are not below the bound, and how many they are."""
    low, found = np.int32(bound), 0
    for i in range(len(row)):
        size = row[i] & SIZE
        above[found] = size
        found += size >= low
    return found


@compiled
def cut_at(above: np.ndarray, some: int, wanted: int, seen: np.ndarray) -> tuple[int, int]:
    """The smallest magnitude that is wanted, and how many of that size are; the magnitudes are used up."""
    left, cut = wanted, 0
    for shift, wide in ((20, 11), (10, 10), (0, 10)):
        seen[:] = 0
        for i in range(some):
            seen[(above[i] >> shift) & ((1 << wide) - 1)] += 1
        digit = (1 << wide) - 1
        while seen[digit] < left:
            left -= seen[digit]
            digit -= 1
        alike = 0
        for i in range(some):
            size = above[i]
            if (size >> shift) & ((1 << wide) - 1) == digit:
                above[alike] = size
                alike += 1
        some = alike
        cut |= digit << shift
    return cut, left if left < some else -1


@compiled
def mark_row(row: np.ndarray, cut: int, ties: int, mask: np.ndarray, kept: np.ndarray) -> None:
    """All of the size of the cut, or so many of them as there are `ties` left, the first ones."""
    low = np.int32(cut)
    if ties < 0 or ties >= len(row):
        for i in range(len(row)):
            mask[i] = (row[i] & SIZE) >= low
    else:
        for i in range(len(row)):
            size = row[i] & SIZE
            equal = size == low
            mask[i] = size > low or (equal and ties > 0)
            ties -= equal
    for i in range(len(kept)):
        kept[i] = row[i] & -np.int32(mask[i])
