"""Plots made of rows: bars, strips of dots, heat maps."""

import math

import numpy as np

from sparing.ui.report.figure import Plot, cut, labels, short, ticks
from sparing.ui.report.svg import LETTER, LINE, WIDE, Drawn, Frame, rule, svg, text, tint

ROW = 26
LEVELS = 10
DOTS = 400  # of a strip at most
NARROW = 340  # a heat map
SIDE = 26.0  # of its cells at most
GOLDEN = 0.6180339887


def base(plot: Plot, names: list[str], high: float, x: tuple[float, float], row: float, room: float) -> tuple:
    """A frame with named rows, an axis below, and a grid."""
    names = labels(names, 34)
    left = 14 + LETTER * longest(names)
    bottom = 8 + row * len(names)
    frame = Frame(left, WIDE - room, 8, bottom, x, (0, 1))
    out = []
    whole = all(y == int(y) for one in plot.series for y in one.y)
    for tick in ticks(*x, whole=whole):
        px, _ = frame.at(tick, 0)
        out += [rule(px, frame.top, px, bottom, "grid"), text(px, bottom + 17, short(tick), "", "middle")]
    out.append(text((frame.left + frame.right) / 2, bottom + 37, plot.x, "label", "middle"))
    for i, name in enumerate(names):
        out.append(text(left - 8, 8 + row * (i + 0.5) + 4, name, "", "end"))
    return frame, out, bottom + high


def bars(plot: Plot) -> Drawn:
    whole = [sum(one.y[i] for one in plot.series) for i in range(len(plot.rows))]
    frame, out, high = base(plot, plot.rows, 46, (0, max(whole) or 1.0), ROW, 70)
    stops = []
    for i, row in enumerate(plot.rows):
        start, y = 0.0, frame.top + ROW * i + 4
        for k, one in enumerate(plot.series):
            a, b = frame.at(start, 0)[0], frame.at(start + one.y[i], 0)[0]
            if b - a > 0.05:
                shape = f'<rect x="{a:.1f}" y="{y:.1f}" width="{b - a:.1f}" height="{ROW - 8}"/>'
                out.append(f'<g class="bar {tint(one.tint)}" data-series="{k}">{shape}</g>')
            start += one.y[i]
        end = frame.at(whole[i], 0)[0]
        out.append(text(end + 6, y + 13, short(whole[i])))
        said = [[k, f"{one.name}: {short(one.y[i])}"] for k, one in enumerate(plot.series) if one.y[i]]
        stops.append([round(end, 1), y + ROW / 2 - 4, row, said])
    return Drawn(svg(out, high, plot), WIDE, stops)


def strips(plot: Plot) -> Drawn:
    values = [y for one in plot.series for y in one.y]
    x = (min(values), max(values)) if max(values) > min(values) else (min(values) - 1, max(values) + 1)
    row = 42
    frame, out, high = base(plot, [one.name for one in plot.series], 46, x, row, 24)
    stops = []
    for i, one in enumerate(plot.series):
        y = frame.top + row * (i + 0.5)
        shown = one.y[:: math.ceil(len(one.y) / DOTS)]
        places = [(frame.at(v, 0)[0], y + 13 * (2 * (k * GOLDEN % 1) - 1)) for k, v in enumerate(shown)]
        body = "".join(f'<circle class="client" cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in places)
        worst, low, half, top = (frame.at(q, 0)[0] for q in np.quantile(one.y, (0.1, 0.25, 0.5, 0.75)))
        body += f'<rect class="box" x="{low:.1f}" y="{y - 9:.1f}" width="{top - low:.1f}" height="18"/>'
        body += rule(half, y - 13, half, y + 13, "median") + rule(worst, y - 5, worst, y + 5, "median")
        out.append(f'<g class="{tint(one.tint)}" data-series="{i}">{body}</g>')
        numbers = dict(
            zip(("worst tenth below", "median", "best tenth above"), np.quantile(one.y, (0.1, 0.5, 0.9)), strict=True)
        )
        said = [[i, f"{name} {value:.4g}"] for name, value in numbers.items()]
        stops.append([round(half, 1), y, one.name, said])
    return Drawn(svg(out, high, plot), WIDE, stops)


def heat(plot: Plot) -> Drawn:
    rows, columns = len(plot.rows), len(plot.columns)
    left = 30 + LETTER * min(longest(plot.rows), 18)
    tall = min(max(260 / rows, 3.0), SIDE)
    cell = min(max((NARROW - left - 12) / columns, 3.0), max(SIDE, LETTER * (longest(plot.columns) + 1)))
    right, bottom = left + cell * columns, 8 + tall * rows
    values = np.array([[math.nan if x is None else x for x in row] for row in plot.values], dtype=float)
    have = values[~np.isnan(values)]
    low, high = plot.scale or ((float(have.min()), float(have.max())) if have.size else (0.0, 1.0))
    colour = "v" if plot.signed else "h"
    level = np.clip((values - low) / ((high - low) or 1.0) * LEVELS, 0, LEVELS - 1)
    out = [f'<rect class="sheet" x="{left:.1f}" y="8" width="{right - left:.1f}" height="{bottom - 8:.1f}"/>']
    for k in range(LEVELS):
        shape = cells(level, k, left, cell, tall)
        if shape:
            out.append(f'<path class="{colour}{k}" d="{shape}"/>')
    every = max(1, math.ceil(12 / tall))
    out += [text(left - 6, 8 + tall * (i + 0.5) + 4, cut(plot.rows[i], 18), "", "end") for i in range(0, rows, every)]
    names, foot = below(plot.columns, left, cell, bottom)
    out += names
    out.append(text(left + (right - left) / 2, foot + 18, plot.x, "label", "middle"))
    middle = 8 + tall * rows / 2
    out.append(text(12, middle, plot.y, "label", "middle", f' transform="rotate(-90 12 {middle:.1f})"'))
    out += scale(left, foot + 30, low, high, colour)
    stops = [left, 8, cell, tall]
    return Drawn(svg(out, foot + 48, plot, NARROW), NARROW, stops, "grid")


def below(names: list[str], left: float, wide: float, bottom: float) -> tuple[list[str], float]:
    """Names of columns, and how far down they go: numbers thinned out, words all there, slanted where they are long."""
    room = math.ceil(LETTER * (longest(names) + 1) / wide - 1e-9)
    middles = [left + wide * (j + 0.5) for j in range(len(names))]
    if room <= 1 or wide < LINE or all(name.replace("-", "").isdigit() for name in names):
        shown = range(0, len(names), max(1, room))
        return [text(middles[j], bottom + 16, names[j], "", "middle") for j in shown], bottom + 16
    names = labels(names, min(18, int((middles[0] + 4) / (0.8 * LETTER))))
    slant = [text(x + 4, bottom + 14, name, "", "end", f' transform="rotate(-40 {x + 4:.1f} {bottom + 14:.1f})"')
             for x, name in zip(middles, names, strict=True)]  # fmt: skip
    return slant, bottom + 16 + 0.64 * LETTER * longest(names)


def longest(names: list[str]) -> int:
    return max(map(len, names))


def cells(level: np.ndarray, k: int, left: float, wide: float, tall: float) -> str:
    """All cells of one colour as a single path, neighbours of a row together."""
    parts = []
    for i, row in enumerate(level):
        j = 0
        while j < len(row):
            start = j
            while j < len(row) and row[j] == row[j] and int(row[j]) == k:
                j += 1
            if j > start:
                run = f"M{left + wide * start:.1f} {8 + tall * i:.1f}h{wide * (j - start):.1f}v{tall:.1f}"
                parts.append(f"{run}h{-wide * (j - start):.1f}z")
            j += 1
    return "".join(parts)


def scale(left: float, y: float, low: float, high: float, colour: str) -> list[str]:
    """What the colours mean."""
    first = text(left, y + 9, short(low))
    start = left + LETTER * len(short(low)) + 8
    at = [(k, start + 12 * k) for k in range(LEVELS)]
    boxes = [f'<rect class="{colour}{k}" x="{x:.1f}" y="{y:.1f}" width="12" height="10"/>' for k, x in at]
    return [first, *boxes, text(start + 12 * LEVELS + 6, y + 9, short(high))]
