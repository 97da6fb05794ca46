"""A few numbers of each client, added without rounding: integers of 160 bits, 64 of them behind the point.

A weight is a whole number of `WEIGHT_GRID` steps, so a weight times a number is an integer too, and whoever adds them,
in whatever order, gets the same sum.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from sparing.core.errors import TrainingError
from sparing.core.grid import WEIGHT_GRID

NUMBER_BITS = 160
_FRACTION_BITS = 64
_LARGEST = 2.0 ** (NUMBER_BITS - _FRACTION_BITS - 32)  # times all weights, and with a sign, it still has room


def to_fixed(x: float, what: str) -> int:
    """A number in steps of 2^-64; `what` it is, for whoever must be told that it cannot be summed.

    >>> to_fixed(0.5, "loss") == 2**63
    True
    """
    if not abs(x) < _LARGEST:
        raise TrainingError(f"{what} is {x:g}, which cannot be summed; lower local.lr, or set local.clip")
    return round(Fraction(x) * (1 << _FRACTION_BITS))


def weighed_fixed(share: float, x: float, what: str) -> int:
    """A weight times a number; where it counts for nothing, the number may be none."""
    return whole_share(share) * to_fixed(x, what) if share else 0


def whole_share(share: float) -> int:
    """A weight in steps of `WEIGHT_GRID`."""
    return int(share / WEIGHT_GRID)


def whole_of_sum(total: int) -> int:
    """The sum of weights, from that of weights times one."""
    return total >> _FRACTION_BITS


def mean_of_sum(total: int, shares: int) -> float:
    """From the sum of weights times numbers and that of the weights, both as integers."""
    return float(Fraction(total, shares << _FRACTION_BITS)) if shares else math.nan


def sample_weighed(n: int, x: float, what: str) -> int:
    """A number of a client with n samples, times n."""
    return n * to_fixed(x, what)


def mean_over_samples(total: int, samples: int) -> float:
    """From the sum of such numbers."""
    return float(Fraction(total, samples << _FRACTION_BITS))


def weighed_mean(shares: Sequence[float], numbers: Sequence[float], what: str) -> float:
    """The mean of some numbers, by these weights.

    >>> weighed_mean([0.25, 0.75], [1.0, 2.0], "loss")
    1.75
    """
    total = sum(weighed_fixed(share, x, what) for share, x in zip(shares, numbers, strict=True))
    return mean_of_sum(total, sum(map(whole_share, shares)))
