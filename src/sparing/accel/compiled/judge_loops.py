"""How a tensor is best sent for a given step, in one compiled call: the numbers of `rate_distortion.judged`."""

import math

import numpy as np

from sparing.accel.compiled.compile import compiled
from sparing.parts.code.budget import rate_distortion
from sparing.parts.code.budget.rate_distortion import CLASSES, FACTOR_HEAD, HEAD, LONGER, ROW_HEAD
from sparing.parts.code.dead_zone import DEAD, TOP

NOTCHES = np.array(rate_distortion.NOTCHES)
UP = 0.5 - DEAD
VALUES, NO_VALUES = np.array([-1, *LONGER]), np.array([-1])
"""Ways of sending values: not at all, or in steps so many notches longer."""


@compiled
def judge(
    x: np.ndarray,
    stands: np.ndarray,
    row: np.ndarray,
    column: np.ndarray,
    classes: np.ndarray,
    both: np.ndarray,
    rows: int,
    peak: np.ndarray,
    ranks: np.ndarray,
    ways: np.ndarray,
    step: float,
    price: float,
    digits: np.ndarray,
) -> tuple[int, int, float]:
    """Rank, notches (-1: no values travel) and bits of the best of these ranks and ways."""
    chosen, notches, taken, least = 0, -1, 0.0, np.inf
    for rank, exact in zip(ranks, digits):  # noqa: B905
        bits, size = 0.0, np.abs(x)
        if rank:
            own = step * NOTCHES[notch_of(step, float(peak[rank]), 0)]
            bits = leave_components(x, row, column, both[:rank], rows, own, exact, size)
        before = np.inf
        for longer in ways:
            own, more = 0.0, 0.0
            if longer >= 0:
                largest = 0.0
                for one in size:
                    largest = max(largest, one)
                own = step * NOTCHES[notch_of(step, largest, longer)]
                more = entropy_of_sizes(size, own, stands, classes) + HEAD
            cost = 0.0
            for i in range(len(size)):
                off = size[i] if longer < 0 else size[i] - code_of(size[i], own) * own
                cost += off * off * stands[i]
            cost += price * (bits + more)
            if cost < least:
                chosen, notches, taken, least = rank, longer, bits + more, cost
            if cost > before:
                break
            before = cost
    return chosen, notches, taken


@compiled
def code_of(size: float, own: float) -> float:
    return min(math.floor(size / own + UP), float(TOP))


@compiled
def notch_of(step: float, peak: float, least: int) -> int:
    """`rate_distortion.notch`."""
    for i in range(least, len(NOTCHES)):
        if TOP * step * NOTCHES[i] >= peak:
            return i
    return len(NOTCHES) - 1


@compiled
def leave_components(
    x: np.ndarray,
    row: np.ndarray,
    column: np.ndarray,
    both: np.ndarray,
    rows: int,
    own: float,
    digits: int,
    left: np.ndarray,
) -> float:
    """Bits that these components take; in `left` the sizes of what their codes leave of the values."""
    rank, wide = both.shape
    codes, largest = np.empty((wide, rank)), 0.0
    for r in range(rank):
        first, second = 0.0, 0.0
        for i in range(wide):
            code = code_of(abs(both[r, i]), own)
            codes[i, r] = -code if both[r, i] < 0 else code
            if i < rows:
                first += code * code
            else:
                second += code * code
        size = math.sqrt(math.sqrt(first * second))
        size = size if size > 0 else 1.0
        for i in range(rows):
            codes[i, r] /= size
            largest = max(largest, abs(codes[i, r]))
    bits = entropy_of_codes(both[:, :rows], own) + entropy_of_codes(both[:, rows:], own)
    unit = math.ldexp(1.0, math.frexp(largest)[1] - digits) if largest > 0 else math.ldexp(1.0, 1 - digits)
    for i in range(rows):
        for r in range(rank):
            codes[i, r] = np.rint(codes[i, r] / unit) * unit
    for i in range(len(x)):
        product = 0.0
        for r in range(rank):
            product += codes[row[i], r] * codes[rows + column[i], r]
        left[i] = abs(x[i] - own * product)
    return bits


@compiled
def entropy_of_codes(numbers: np.ndarray, own: float) -> float:
    """`rate_distortion.entropy_of_rows` of the codes of these numbers."""
    rank = len(numbers)
    counts = np.zeros((rank, 256))
    for r in range(rank):
        for one in numbers[r]:
            code = int(code_of(abs(one), own))
            counts[r, 256 - code if one < 0 and code else code] += 1.0
    every, rows, apart, joint = np.zeros(256), 0.0, 0.0, 0.0
    for r in range(rank):
        rows += share_log(counts[r].sum())
        for s in range(256):
            every[s] += counts[r, s]
            apart += share_log(counts[r, s])
    for s in range(256):
        joint += share_log(every[s])
    return min(share_log(float(numbers.size)) - joint, rows - apart + ROW_HEAD * rank) + FACTOR_HEAD


@compiled
def entropy_of_sizes(size: np.ndarray, own: float, stands: np.ndarray, classes: np.ndarray) -> float:
    """`rate_distortion._entropy_of_codes` of values of these sizes."""
    counts, known = np.zeros((CLASSES, TOP + 1)), len(classes) > 0
    for i in range(len(size)):
        counts[classes[i] if known else 0, int(code_of(size[i], own))] += stands[i]
    whole, each, signs = 0.0, 0.0, 0.0
    for kind in range(CLASSES):
        total = 0.0
        for code in range(TOP + 1):
            total += counts[kind, code]
            each += share_log(counts[kind, code])
            signs += counts[kind, code] if code else 0.0
        whole += share_log(total)
    return whole - each + signs


@compiled
def share_log(n: float) -> float:
    """n log2 n, the logarithm to 30 binary places."""
    return n * (np.rint(math.log2(n) * 2.0**30) * 2.0**-30) if n > 0 else 0.0
