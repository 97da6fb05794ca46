"""Means over seeds, paired differences with 95 % intervals, and what may be said of a claim by its interval."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats


class Interval(NamedTuple):
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.low:+.1f}, {self.high:+.1f}]"


def interval(values: Sequence[float]) -> Interval:
    """Of the mean, 95 %, by Student's t; one value says nothing of itself.

    >>> print(interval([1.0, 2.0, 3.0]))
    +2.0 [-0.5, +4.5]
    """
    mean = statistics.mean(values)
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def at_least(found: Interval, bound: float) -> str:
    """Whether something is no less than the bound.

    >>> at_least(Interval(1, 0.5, 1.5), 0), at_least(Interval(1, -0.5, 2.5), 0), at_least(Interval(-1, -2, -0.1), 0)
    ('holds', 'not settled', 'does not hold')
    """
    return "holds" if found.low >= bound else "does not hold" if found.high < bound else "not settled"


def near(found: Interval, published: float, by: float = 1.0) -> str:
    """Whether something is what was published, give or take `by`.

    >>> near(Interval(42, 41.5, 42.5), 42.3), near(Interval(30, 29, 31), 42.3), near(Interval(42, 38, 46), 42.3)
    ('holds', 'does not hold', 'not settled')
    """
    if published - by <= found.low and found.high <= published + by:
        return "holds"
    return "does not hold" if found.high < published - by or found.low > published + by else "not settled"


def variance_ratio(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Of two variances, and the chance of one as small if both were equal, by Levene's test about the median.

    >>> variance_ratio([1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0])[0]
    0.01
    """
    ratio = statistics.variance(values) / statistics.variance(others)
    return ratio, float(stats.levene(values, others, center="median").pvalue)
