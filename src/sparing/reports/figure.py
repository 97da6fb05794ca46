"""What a figure is: data and words. Who draws it decides what it looks like."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from sparing.reports.comparison_tables import TextTable

_MOST_POINTS = 200  # points of a line that are drawn
_DECADES = 20.0  # from the least value to the largest, beyond which lines are drawn on a log scale
_FEW = 6  # series: points with names beside them, and bands of full strength


class Series(NamedTuple):
    """One line, one set of points, or one part of every bar."""

    name: str
    y: list[float]
    x: list[float] = []  # noqa: RUF012  lines and points only
    spread: list[float] | None = None  # standard deviation, each way
    tint: int = 0  # which colour: a method has the same one everywhere
    hollow: bool = False


class Plot(NamedTuple):
    """One pair of axes.

    lines    series over x
    points   series of one point each, named; `front` joins those that nobody beats
    bars     a bar for each of `rows`, a part of it for each series
    strips   a row of dots for each series
    heat     `values` by rows and columns, None for nothing
    """

    kind: str
    x: str = ""
    y: str = ""
    title: str = ""
    series: list[Series] = []  # noqa: RUF012
    log: bool = False  # of x
    rows: list[str] = []  # noqa: RUF012
    columns: list[str] = []  # noqa: RUF012
    values: list[list[float | None]] = []  # noqa: RUF012
    front: list[tuple[float, float]] = []  # noqa: RUF012
    scale: tuple[float, float] | None = None  # of a heat map's colours: its own values', if not given
    signed: bool = False  # two colours, one below 0 and one above
    fresh: bool = False  # begins a row of plots
    low_is_worst: bool = True  # of strips: which end is marked
    log_y: bool = False  # of lines


class Figure(NamedTuple):
    """A title that says what is seen, one sentence on how to read it, the plots, and their numbers."""

    key: str  # also the name of its file
    title: str
    read: str
    plots: list[Plot]
    tables: list[TextTable]  # a heat map's own table has its place in the list of plots


def has_legend(plot: Plot) -> bool:
    """Rows of dots and maps name their rows themselves, and so do a few points."""
    return has_many(plot) if plot.kind == "points" else plot.kind in ("lines", "bars") and len(plot.series) > 1


def has_many(plot: Plot) -> bool:
    return len(plot.series) > _FEW


def one_legend(plots: Sequence[Plot]) -> Plot | None:
    """A plot whose legend serves all of these; None where they show different series."""
    widest = max(plots, key=lambda plot: len(plot.series), default=None)
    if widest is None:
        return None
    known = {(one.name, one.tint) for one in widest.series}
    inside = (plot.kind == widest.kind and {(one.name, one.tint) for one in plot.series} <= known for plot in plots)
    return widest if all(inside) else None


def thinned_places(count: int) -> list[int]:
    """Places of a long line that are drawn: evenly spread, first and last among them."""
    if count <= _MOST_POINTS:
        return list(range(count))
    return sorted({round(i * (count - 1) / (_MOST_POINTS - 1)) for i in range(_MOST_POINTS)})


def spans_decades(series: Sequence[Series]) -> bool:
    """Whether lines fall or rise so far that only a log scale shows where they end.

    >>> [spans_decades([Series("a", y)]) for y in ([2.0, 0.01], [2.0, 1.0], [2.0, 0.0])]
    [True, False, False]
    """
    values = [y for one in series for y in one.y]
    return bool(values) and min(values) > 0 and max(values) > _DECADES * min(values)


def axis_ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """Round numbers from low to high; whole ones where only those make sense.

    >>> axis_ticks(0, 1), axis_ticks(12, 88)
    ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [20.0, 40.0, 60.0, 80.0])
    """
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step = max(step, 1.0) if whole else step
    step *= next(k for k in (1, 2, 5, 10, 20) if (high - low) / (step * k) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, and 2 and 5 times them where there are few.

    >>> log_ticks(0.5, 60), log_ticks(1, 1e5)
    ([0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0], [1.0, 10.0, 100.0, 1000.0, 10000.0, 100000.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    decades = math.log10(high / low)
    steps = (1, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,)
    found = [float(f"{k * 10.0**p:.6g}") for p in powers for k in steps]
    return [x for x in found if low * 0.999 <= x <= high * 1.001]


def short_number(x: float) -> str:
    """A number as a reader wants it.

    >>> [short_number(x) for x in (1234567, -0.25, 3.14159, float("nan"), 1.2e-5)]
    ['1,234,567', '−0.25', '3.142', '-', '1.2e−05']
    """
    if x != x:
        return "-"
    return with_minus(f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}")


_HYPHEN_OF_NUMBER = re.compile(r"(?:(?<![^\s(\[])|(?<=\de))-(?=\.?\d)")


def with_minus(text: str) -> str:
    """Numbers in a text with a minus sign where they have a hyphen; words keep theirs.

    >>> with_minus("-1.20 [-2.5e-05, +0.1] (-3%)"), with_minus("lg-fedavg-2 -")
    ('−1.20 [−2.5e−05, +0.1] (−3%)', 'lg-fedavg-2 -')
    """
    return _HYPHEN_OF_NUMBER.sub("−", text)


def counted_word(count: int, word: str) -> str:
    """
    >>> counted_word(1, "seed"), counted_word(3, "seed")
    ('1 seed', '3 seeds')
    """
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def shorten_middle(words: str, most: int) -> str:
    """Both ends, where names often differ.

    >>> shorten_middle("psfed+int8", 20), shorten_middle("psfed+topk+int8+memory", 10)
    ('psfed+int8', 'psfe…emory')
    """
    kept = most - 1
    return words if len(words) <= most else f"{words[: kept // 2]}…{words[len(words) - (kept - kept // 2) :]}"


def distinct_labels(names: Sequence[str], most: int) -> list[str]:
    """Names cut to about so many letters, no two different ones to the same: those begin at the word that differs.

    >>> distinct_labels(["stein (local.lr=0.1, rounds=5)", "stein (local.lr=0.2, rounds=5)", "fedavg"], 13)
    ['…local.lr=0.1,…', '…local.lr=0.2,…', 'fedavg']
    """
    first = [shorten_middle(name, most) for name in names]
    out = []
    for name, said in zip(names, first, strict=True):
        like = {other for other, words in zip(names, first, strict=True) if words == said}
        same = next((i for i, letters in enumerate(zip(*like, strict=False)) if len(set(letters)) > 1), 0)
        rest = name[max(name.rfind(sign, 0, same) for sign in " (+") + 1 :]
        out.append(said if len(like) == 1 else "…" + rest[:most] + "…" * (len(rest) > most))
    return out if len(set(out)) == len(set(names)) else distinct_labels(names, most + 6)


def padded_range(values: Sequence[float], room: float = 0.05) -> tuple[float, float]:
    """The least and the largest, with a little room."""
    have = [x for x in values if math.isfinite(x)] or [0.0, 1.0]
    low, high = min(have), max(have)
    pad = room * (high - low) if high > low else max(abs(high), 1.0) * room
    return low - pad, high + pad
