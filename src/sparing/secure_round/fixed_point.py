"""A few numbers of each client, added without rounding: integers of 160 bits, 64 of them behind the point.

A weight is a whole number of `WEIGHT_GRID` steps, so a weight times a number is an integer too, and whoever adds them,
in whatever order, gets the same sum.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from sparing.core.errors import TrainingError
from sparing.core.grid import WEIGHT_GRID

BITS = 160
_BEHIND = 64
_LARGEST = 2.0 ** (BITS - _BEHIND - 32)


def to_fixed(x: float, what: str) -> int:
    """
    >>> to_fixed(0.5, "loss") == 2**63
    True
    """
    if not abs(x) < _LARGEST:
        raise TrainingError(f"{what} is {x:g}, which cannot be summed; lower local.lr, or set local.clip")
    return round(Fraction(x) * (1 << _BEHIND))


def weighed_fixed(share: float, x: float, what: str) -> int:
    """A weight times a number; where it counts for nothing, the number may be none."""
    return whole_share(share) * to_fixed(x, what) if share else 0


def whole_share(share: float) -> int:
    return int(share / WEIGHT_GRID)


def whole_of_sum(total: int) -> int:
    """The sum of weights, from that of weights times one."""
    return total >> _BEHIND


def mean_of_sum(total: int, shares: int) -> float:
    """From the sum of weights times numbers and that of the weights, both as integers."""
    return float(Fraction(total, shares << _BEHIND)) if shares else math.nan


def sample_weighed(n: int, x: float, what: str) -> int:
    """A number of a client with n samples, times n."""
    return n * to_fixed(x, what)


def mean_over_samples(total: int, samples: int) -> float:
    """From the sum of such numbers."""
    return float(Fraction(total, samples << _BEHIND))


def weighed_mean(shares: Sequence[float], numbers: Sequence[float], what: str) -> float:
    """
    >>> weighed_mean([0.25, 0.75], [1.0, 2.0], "loss")
    1.75
    """
    total = sum(weighed_fixed(share, x, what) for share, x in zip(shares, numbers, strict=True))
    return mean_of_sum(total, sum(map(whole_share, shares)))
