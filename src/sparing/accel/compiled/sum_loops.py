"""Row-exact sums in one pass: the additions of `core.reduce.total`, in its order, with nothing written in between."""

import numpy as np

from sparing.accel.compiled.compile import compiled
from sparing.core.reduce import DEPTH, LANES

BLOCK = LANES * DEPTH


@compiled
def sum_by_halves(lane: np.ndarray, wide: int) -> float:
    """Of so many numbers, which are used up."""
    while wide > 1:
        half = 1
        while 2 * half < wide:
            half *= 2
        low, high = lane[:half], lane[half:wide]
        for j in range(len(high)):
            low[j] += high[j]
        wide = half
    return lane[0]


@compiled
def lanes_of(n: int) -> int:
    """Of one block of n numbers."""
    lanes = 1
    while lanes < min(n, LANES):
        lanes *= 2
    return lanes


@compiled
def sum_up(row: np.ndarray, n: int) -> float:
    """Of the first n numbers, which are used up."""
    lane = np.empty(LANES)
    while True:
        blocks = 0
        for start in range(0, n, BLOCK):
            m = min(BLOCK, n - start)
            lanes = lanes_of(m)
            wide = min(lanes, m)
            some = row[start : start + wide]
            for j in range(len(some)):
                lane[j] = some[j]
            for i in range(start + lanes, start + m, lanes):
                more = row[i : min(i + lanes, start + m)]
                for j in range(len(more)):
                    lane[j] += more[j]
            row[blocks] = sum_by_halves(lane, wide)
            blocks += 1
        if blocks <= 1:
            return row[0]
        n = blocks


@compiled
def sum_rows(x: np.ndarray, out: np.ndarray, first: int, last: int) -> None:
    n = x.shape[1]
    lane, sums = np.empty(LANES), np.empty(n // BLOCK + 2)
    for k in range(first, last):
        blocks = 0
        for start in range(0, n, BLOCK):
            m = min(BLOCK, n - start)
            lanes = lanes_of(m)
            wide = min(lanes, m)
            row = x[k, start : start + m]
            for j in range(wide):
                lane[j] = row[j]
            for i in range(lanes, m, lanes):
                some = row[i : min(i + lanes, m)]
                for j in range(len(some)):
                    lane[j] += some[j]
            sums[blocks] = sum_by_halves(lane, wide)
            blocks += 1
        out[k] = sum_up(sums, blocks)


@compiled
def _fill_lanes(lane: np.ndarray, some: np.ndarray) -> None:
    for j in range(len(some)):
        lane[j] = some[j]


@compiled
def _clear_lanes(lane: np.ndarray, there: np.ndarray) -> None:
    for j in range(len(there)):
        lane[j] = lane[j] if there[j] else 0.0


@compiled
def _add_products(a: np.ndarray, b: np.ndarray, lane: np.ndarray, wide: int, anew: bool) -> None:
    x, y, into = a[:wide], b[:wide], lane[:wide]
    if anew:
        for j in range(wide):
            into[j] = x[j] * y[j]
    else:
        for j in range(wide):
            into[j] += x[j] * y[j]


@compiled
def multiply_rows(
    x: np.ndarray, plus: np.ndarray, minus: np.ndarray, other: np.ndarray, mask: np.ndarray, out: np.ndarray,
    first: int, last: int,
) -> None:  # fmt: skip
    """Sums of a a, a b and b b of these rows, `out [3, K]`: a = x + plus - minus, b = other, zero where no mask is.

    What has no columns is not there; without an `other` only a a is.
    """
    n = x.shape[1]
    adds, takes, both, masked = plus.shape[1] > 0, minus.shape[1] > 0, other.shape[1] > 0, mask.shape[1] > 0
    alone = len(other) == 1 and (not masked or len(mask) == 1)  # then b b is the same for all
    a, b = np.empty(LANES), np.empty(LANES)
    aa, ab, bb = np.empty(LANES), np.empty(LANES), np.empty(LANES)
    sums = np.empty((3, n // BLOCK + 2))
    for k in range(first, last):
        xs, ps, ms = x[min(k, len(x) - 1)], plus[min(k, len(plus) - 1)], minus[min(k, len(minus) - 1)]
        os, here = other[min(k, len(other) - 1)], mask[min(k, len(mask) - 1)]
        fresh = both and (k == first or not alone)
        blocks = 0
        for start in range(0, n, BLOCK):
            m = min(BLOCK, n - start)
            lanes = lanes_of(m)
            wide = min(lanes, m)
            for i in range(start, start + m, lanes):
                to = min(i + lanes, start + m)
                _fill_lanes(a, xs[i:to])
                if adds:
                    more = ps[i:to]
                    for j in range(len(more)):
                        a[j] += more[j]
                if takes:
                    less = ms[i:to]
                    for j in range(len(less)):
                        a[j] -= less[j]
                if masked:
                    _clear_lanes(a, here[i:to])
                _add_products(a, a, aa, to - i, i == start)
                if both:
                    _fill_lanes(b, os[i:to])
                    if masked:
                        _clear_lanes(b, here[i:to])
                    _add_products(a, b, ab, to - i, i == start)
                    if fresh:
                        _add_products(b, b, bb, to - i, i == start)
            sums[0, blocks] = sum_by_halves(aa, wide)
            if both:
                sums[1, blocks] = sum_by_halves(ab, wide)
            if fresh:
                sums[2, blocks] = sum_by_halves(bb, wide)
            blocks += 1
        out[0, k] = sum_up(sums[0], blocks)
        if both:
            out[1, k] = sum_up(sums[1], blocks)
            out[2, k] = sum_up(sums[2], blocks) if fresh else out[2, first]


@compiled
def sum_structures(x: np.ndarray, filters: np.ndarray, channels: np.ndarray, first: int, last: int) -> None:
    """Sums of magnitudes in every row and in every column of x `[K, F, C]`, of at most `BLOCK` of each."""
    rows, columns = x.shape[1:]
    size = np.empty(columns)
    lanes = lanes_of(rows)
    lane = np.empty((lanes, columns))
    for k in range(first, last):
        for i in range(rows):
            row = x[k, i]
            for j in range(columns):
                size[j] = abs(row[j])
            into = lane[i % lanes]
            if i < lanes:
                for j in range(columns):
                    into[j] = size[j]
            else:
                for j in range(columns):
                    into[j] += size[j]
            filters[k, i] = sum_up(size, columns)
        wide = min(lanes, rows)
        while wide > 1:
            half = 1
            while 2 * half < wide:
                half *= 2
            for i in range(wide - half):
                low, high = lane[i], lane[half + i]
                for j in range(columns):
                    low[j] += high[j]
            wide = half
        for j in range(columns):
            channels[k, j] = lane[0, j]
