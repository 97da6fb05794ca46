"""Figures over seeds as the tables show them: mean ± standard deviation (n - 1); one seed has none."""

import statistics


def deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def mean_spread(values: list[float], digits: int = 1, sign: str = "") -> str:
    """
    >>> mean_spread([1.0, 2.0, 3.0]), mean_spread([2.5], sign="+")
    ('2.0 ± 1.0', '+2.5')
    """
    mean, apart = f"{statistics.mean(values):{sign}.{digits}f}", deviation(values)
    return mean if apart is None else f"{mean} ± {apart:.{digits}f}"
