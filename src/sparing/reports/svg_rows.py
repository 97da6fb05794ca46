"""Plots made of rows: bars, strips of dots, heat maps."""

import math

import numpy as np

from sparing.reports.figure import Plot, axis_ticks, distinct_labels, short_number, shorten_middle
from sparing.reports.svg import (
    LETTER_WIDTH,
    LINE_HEIGHT,
    SVG_WIDTH,
    DrawnPlot,
    SvgFrame,
    svg_document,
    svg_rule,
    svg_text,
    tint_classes,
)

_ROW_HEIGHT = 26
_HEAT_LEVELS = 10
_MOST_DOTS = 400  # of a strip at most
_HEAT_WIDTH = 340  # a heat map
_MOST_CELL_SIDE = 26.0  # of its cells at most
_GOLDEN_RATIO = 0.6180339887


def _rows_frame(plot: Plot, names: list[str], high: float, x: tuple[float, float], row: float, room: float) -> tuple:
    """A frame with named rows, an axis below, and a grid."""
    names = distinct_labels(names, 34)
    left = 14 + LETTER_WIDTH * _longest_name(names)
    bottom = 8 + row * len(names)
    frame = SvgFrame(left, SVG_WIDTH - room, 8, bottom, x, (0, 1))
    out = []
    whole = all(y == int(y) for one in plot.series for y in one.y)
    for tick in axis_ticks(*x, whole=whole):
        px, _ = frame.at(tick, 0)
        out += [
            svg_rule(px, frame.top, px, bottom, "grid"),
            svg_text(px, bottom + 17, short_number(tick), "", "middle"),
        ]
    out.append(svg_text((frame.left + frame.right) / 2, bottom + 37, plot.x, "label", "middle"))
    for i, name in enumerate(names):
        out.append(svg_text(left - 8, 8 + row * (i + 0.5) + 4, name, "", "end"))
    return frame, out, bottom + high


def svg_bars(plot: Plot) -> DrawnPlot:
    whole = [sum(one.y[i] for one in plot.series) for i in range(len(plot.rows))]
    frame, out, high = _rows_frame(plot, plot.rows, 46, (0, max(whole) or 1.0), _ROW_HEIGHT, 70)
    stops = []
    for i, row in enumerate(plot.rows):
        start, y = 0.0, frame.top + _ROW_HEIGHT * i + 4
        for k, one in enumerate(plot.series):
            a, b = frame.at(start, 0)[0], frame.at(start + one.y[i], 0)[0]
            if b - a > 0.05:
                shape = f'<rect x="{a:.1f}" y="{y:.1f}" width="{b - a:.1f}" height="{_ROW_HEIGHT - 8}"/>'
                out.append(f'<g class="bar {tint_classes(one.tint)}" data-series="{k}">{shape}</g>')
            start += one.y[i]
        end = frame.at(whole[i], 0)[0]
        out.append(svg_text(end + 6, y + 13, short_number(whole[i])))
        said = [[k, f"{one.name}: {short_number(one.y[i])}"] for k, one in enumerate(plot.series) if one.y[i]]
        stops.append([round(end, 1), y + _ROW_HEIGHT / 2 - 4, row, said])
    return DrawnPlot(svg_document(out, high, plot), SVG_WIDTH, stops)


def svg_strips(plot: Plot) -> DrawnPlot:
    values = [y for one in plot.series for y in one.y]
    x = (min(values), max(values)) if max(values) > min(values) else (min(values) - 1, max(values) + 1)
    row = 42
    frame, out, high = _rows_frame(plot, [one.name for one in plot.series], 46, x, row, 24)
    stops = []
    for i, one in enumerate(plot.series):
        y = frame.top + row * (i + 0.5)
        shown = one.y[:: math.ceil(len(one.y) / _MOST_DOTS)]
        places = [(frame.at(v, 0)[0], y + 13 * (2 * (k * _GOLDEN_RATIO % 1) - 1)) for k, v in enumerate(shown)]
        body = "".join(f'<circle class="client" cx="{a:.1f}" cy="{b:.1f}" r="2.6"/>' for a, b in places)
        tail = 0.1 if plot.low_is_worst else 0.9
        worst, low, half, top = (frame.at(q, 0)[0] for q in np.quantile(one.y, (tail, 0.25, 0.5, 0.75)))
        body += f'<rect class="box" x="{low:.1f}" y="{y - 9:.1f}" width="{top - low:.1f}" height="18"/>'
        body += svg_rule(half, y - 13, half, y + 13, "median") + svg_rule(worst, y - 5, worst, y + 5, "median")
        out.append(f'<g class="{tint_classes(one.tint)}" data-series="{i}">{body}</g>')
        ends = ("worst", "best") if plot.low_is_worst else ("best", "worst")
        words = (f"{ends[0]} tenth below", "median", f"{ends[1]} tenth above")
        numbers = dict(zip(words, np.quantile(one.y, (0.1, 0.5, 0.9)), strict=True))
        said = [[i, f"{name} {short_number(value)}"] for name, value in numbers.items()]
        stops.append([round(half, 1), y, one.name, said])
    return DrawnPlot(svg_document(out, high, plot), SVG_WIDTH, stops)


def svg_heat(plot: Plot) -> DrawnPlot:
    rows, columns = len(plot.rows), len(plot.columns)
    left = 30 + LETTER_WIDTH * min(_longest_name(plot.rows), 18)
    tall = min(max(260 / rows, 3.0), _MOST_CELL_SIDE)
    cell = min(
        max((_HEAT_WIDTH - left - 12) / columns, 3.0),
        max(_MOST_CELL_SIDE, LETTER_WIDTH * (_longest_name(plot.columns) + 1)),
    )
    right, bottom = left + cell * columns, 8 + tall * rows
    values = np.array([[math.nan if x is None else x for x in row] for row in plot.values], dtype=float)
    have = values[~np.isnan(values)]
    low, high = plot.scale or ((float(have.min()), float(have.max())) if have.size else (0.0, 1.0))
    colour = "v" if plot.signed else "h"
    level = np.clip((values - low) / ((high - low) or 1.0) * _HEAT_LEVELS, 0, _HEAT_LEVELS - 1)
    out = [f'<rect class="sheet" x="{left:.1f}" y="8" width="{right - left:.1f}" height="{bottom - 8:.1f}"/>']
    for k in range(_HEAT_LEVELS):
        shape = _cells_path(level, k, left, cell, tall)
        if shape:
            out.append(f'<path class="{colour}{k}" d="{shape}"/>')
    every = max(1, math.ceil(12 / tall))
    out += [
        svg_text(left - 6, 8 + tall * (i + 0.5) + 4, shorten_middle(plot.rows[i], 18), "", "end")
        for i in range(0, rows, every)
    ]
    names, foot = _column_names(plot.columns, left, cell, bottom)
    out += names
    out.append(svg_text(left + (right - left) / 2, foot + 18, plot.x, "label", "middle"))
    middle = 8 + tall * rows / 2
    out.append(svg_text(12, middle, plot.y, "label", "middle", f' transform="rotate(-90 12 {middle:.1f})"'))
    out += _colour_scale(left, foot + 30, low, high, colour)
    stops = [left, 8, cell, tall]
    return DrawnPlot(svg_document(out, foot + 48, plot, _HEAT_WIDTH), _HEAT_WIDTH, stops, "grid")


def _column_names(names: list[str], left: float, wide: float, bottom: float) -> tuple[list[str], float]:
    """Names of columns, and how far down they go: numbers thinned out, words all there, slanted where they are long."""
    room = math.ceil(LETTER_WIDTH * (_longest_name(names) + 1) / wide - 1e-9)
    middles = [left + wide * (j + 0.5) for j in range(len(names))]
    if room <= 1 or wide < LINE_HEIGHT or all(name.replace("-", "").isdigit() for name in names):
        shown = range(0, len(names), max(1, room))
        return [svg_text(middles[j], bottom + 16, names[j], "", "middle") for j in shown], bottom + 16
    names = distinct_labels(names, min(18, int((middles[0] + 4) / (0.8 * LETTER_WIDTH))))
    slant = [svg_text(x + 4, bottom + 14, name, "", "end", f' transform="rotate(-40 {x + 4:.1f} {bottom + 14:.1f})"')
             for x, name in zip(middles, names, strict=True)]  # fmt: skip
    return slant, bottom + 16 + 0.64 * LETTER_WIDTH * _longest_name(names)


def _longest_name(names: list[str]) -> int:
    return max(map(len, names))


def _cells_path(level: np.ndarray, k: int, left: float, wide: float, tall: float) -> str:
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


def _colour_scale(left: float, y: float, low: float, high: float, colour: str) -> list[str]:
    """What the colours mean."""
    first = svg_text(left, y + 9, short_number(low))
    start = left + LETTER_WIDTH * len(short_number(low)) + 8
    at = [(k, start + 12 * k) for k in range(_HEAT_LEVELS)]
    boxes = [f'<rect class="{colour}{k}" x="{x:.1f}" y="{y:.1f}" width="12" height="10"/>' for k, x in at]
    return [first, *boxes, svg_text(start + 12 * _HEAT_LEVELS + 6, y + 9, short_number(high))]
