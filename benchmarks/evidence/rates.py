"""A learning rate with a worse one on either side, found in the same number of trials at most for every row."""

import math
from collections.abc import Collection, Mapping

STEP = 2.0
MOST = 7
"""Trials of a row."""


def next_rates(start: float, scores: Mapping[float, float]) -> list[float]:
    """Those to try next, given what was tried: first three, then one more beyond the edge on which the best one lies.

    >>> next_rates(0.1, {})
    [0.05, 0.1, 0.2]
    >>> next_rates(0.1, {0.05: 0.3, 0.1: 0.6, 0.2: 0.7})
    [0.4]
    >>> next_rates(0.1, {0.05: 0.3, 0.1: 0.6, 0.2: 0.5})
    []
    """
    first = [float(f"{start * factor:.4g}") for factor in (1 / STEP, 1, STEP)]
    if missing := [rate for rate in first if rate not in scores]:
        return missing
    if len(scores) >= MOST or all(score == -math.inf for score in scores.values()):
        return []
    best, tried = best_rate(scores), sorted(scores)
    if best == tried[0]:
        return [float(f"{best / STEP:.4g}")]
    return [float(f"{best * STEP:.4g}")] if best == tried[-1] else []


def best_rate(scores: Mapping[float, float]) -> float:
    """The lowest of the best."""
    return max(sorted(scores), key=lambda rate: scores[rate])


def steady_rate(scores: Mapping[float, float], apart: Collection[float]) -> float:
    """The best, or the highest below it at which no run came apart; the lowest of all at worst.

    >>> scores = {0.05: 0.4, 0.1: 0.5, 0.2: 0.7, 0.4: 0.6}
    >>> steady_rate(scores, []), steady_rate(scores, [0.2]), steady_rate(scores, [0.2, 0.1, 0.05])
    (0.2, 0.1, 0.05)
    """
    below = [rate for rate in scores if rate <= best_rate(scores)]
    return max((rate for rate in below if rate not in apart), default=min(below))


def is_bracketed(scores: Mapping[float, float]) -> bool:
    """
    >>> is_bracketed({0.1: 0.5, 0.2: 0.6}), is_bracketed({0.1: 0.5, 0.2: 0.6, 0.4: 0.1})
    (False, True)
    """
    return bool(scores) and best_rate(scores) not in (min(scores), max(scores))
