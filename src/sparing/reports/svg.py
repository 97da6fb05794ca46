"""Plots as SVG, and what to say at each place. Looks are CSS classes: t0 and d0 on for the colour and dash of a series,
h0 to h9 for heat, v0 to v9 for heat below and above zero."""

import math
from collections.abc import Callable
from html import escape
from typing import Any, NamedTuple

from sparing.reports.figure import (
    Plot,
    axis_ticks,
    distinct_labels,
    has_legend,
    has_many,
    log_ticks,
    padded_range,
    short_number,
)

SVG_WIDTH, _SVG_HEIGHT = 560, 320
_TINTS = 12
LETTER_WIDTH, _BOLD_WIDTH = 7.4, 8.4  # the width of one in a wide face
LINE_HEIGHT = 15  # from one label to the next


class DrawnPlot(NamedTuple):
    """The picture, and where a pointer or an arrow key can stop: x, y, a head, and [series, text] lines."""

    svg: str
    width: int
    stops: list[list[Any]]
    mode: str = "near"  # "x": the stop nearest in x alone


class SvgFrame(NamedTuple):
    """Data to pixels."""

    left: float
    right: float
    top: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False
    log_y: bool = False

    def at(self, x: float, y: float) -> tuple[float, float]:
        a, b = self.x
        share = math.log(x / a) / math.log(b / a) if self.log else (x - a) / (b - a)
        low, top = self.y
        if self.log_y:
            high = math.log(min(max(y, low), top) / low) / math.log(top / low)
        else:
            high = (y - low) / (top - low)
        return self.left + share * (self.right - self.left), self.bottom - high * (self.bottom - self.top)


_MARK_SHAPES = (
    "M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0 -11 0z",
    "M-5-5h10v10h-10z",
    "M0-7L6 0L0 7L-6 0z",
    "M0-6L6 5H-6z",
    "M0 6L6-5H-6z",
    "M-2-6h4v4h4v4h-4v4h-4v-4h-4v-4h4z",
    "M-6-6L0-3L6-6L3 0L6 6L0 3L-6 6L-3 0z",
    "M-7-4h14v8h-14z",
    "M5-6L-6 0L5 6z",
    "M-5-6L6 0L-5 6z",
    "M-3-6h6l4 6l-4 6h-6l-4-6z",
    "M-4-7h8v14h-8z",
)


def dash_index(i: int) -> int:
    """Which dash or mark: one further each time the colours begin again."""
    return (i + i // _TINTS) % _TINTS


def mark_shape(i: int) -> str:
    return _MARK_SHAPES[dash_index(i)]


def tint_classes(i: int) -> str:
    return f"t{i % _TINTS} d{dash_index(i)}"


def svg_text(x: float, y: float, words: str, kind: str = "", anchor: str = "start", more: str = "") -> str:
    look = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{look} text-anchor="{anchor}"{more}>{escape(words)}</text>'


def svg_rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<path class="{kind}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def _svg_path(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _svg_axes(plot: Plot, frame: SvgFrame) -> list[str]:
    out = []
    whole = all(x == int(x) for one in plot.series for x in one.x)
    for x in log_ticks(*frame.x) if frame.log else axis_ticks(*frame.x, whole=whole):
        px, _ = frame.at(x, frame.y[0])
        out += [
            svg_rule(px, frame.bottom, px, frame.bottom + 4, "rule"),
            svg_text(px, frame.bottom + 18, short_number(x), "", "middle"),
        ]
    for y in _y_ticks(frame):
        _, py = frame.at(frame.x[1], y)
        out += [
            svg_rule(frame.left, py, frame.right, py, "grid"),
            svg_text(frame.left - 8, py + 4, short_number(y), "", "end"),
        ]
    out.append(svg_rule(frame.left, frame.bottom, frame.right, frame.bottom, "rule"))
    middle = (frame.left + frame.right) / 2
    out.append(svg_text(middle, frame.bottom + 38, plot.x, "label", "middle"))
    out.append(svg_text(4, frame.top - 12, plot.y, "label"))
    return out


def _y_ticks(frame: SvgFrame) -> list[float]:
    return log_ticks(*frame.y) if frame.log_y else axis_ticks(*frame.y, 5)


def _plot_frame(plot: Plot, right: float) -> SvgFrame:
    xs = [x for one in plot.series for x in one.x]
    ends = [y + k * s for one in plot.series for y, s in zip(one.y, one.spread or [0.0] * len(one.y), strict=True)
            for k in (-1, 1)]  # fmt: skip
    if plot.log:
        low, high = min(x for x in xs if x > 0), max(xs)
        x = (low / 1.15, high * 1.15)
    else:
        x = (min(xs), max(xs)) if max(xs) > min(xs) else (min(xs) - 1, max(xs) + 1)
    values = [y for one in plot.series for y in one.y]
    y = (min(values) / 1.15, max(ends) * 1.15) if plot.log_y else padded_range(ends)
    frame = SvgFrame(0, SVG_WIDTH - right, 30, _SVG_HEIGHT - 46, x, y, plot.log, plot.log_y)
    return frame._replace(left=16 + LETTER_WIDTH * max(len(short_number(tick)) for tick in _y_ticks(frame)))


def _svg_lines(plot: Plot) -> DrawnPlot:
    frame = _plot_frame(plot, 16)
    out, faint = _svg_axes(plot, frame), " faint" if has_many(plot) else ""
    for i, one in enumerate(plot.series):
        points = [frame.at(x, y) for x, y in zip(one.x, one.y, strict=True) if x > 0 or not plot.log]
        body = ""
        if one.spread is not None and len(points) > 1:
            both = list(zip(one.x, one.y, one.spread, strict=True))
            edge = [frame.at(x, y + s) for x, y, s in both] + [frame.at(x, y - s) for x, y, s in reversed(both)]
            body += f'<path class="band{faint}" d="{_svg_path(edge)}Z"/>'
        dash = " dashed" if one.hollow else ""
        body += f'<path class="line{dash}" d="{_svg_path(points)}"/>'
        if len(points) <= 30:
            body += "".join(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.4"/>' for x, y in points)
        out.append(f'<g class="{tint_classes(one.tint)}" data-series="{i}">{body}</g>')
    stops = _line_stops(plot, frame)
    return DrawnPlot(svg_document(out, _SVG_HEIGHT, plot), SVG_WIDTH, stops, "x")


def _line_stops(plot: Plot, frame: SvgFrame) -> list[list[Any]]:
    """One for each x that any line has; lines that have none there say nothing."""
    said: dict[float, list[list[Any]]] = {}
    place: dict[float, float] = {}
    for i, one in enumerate(plot.series):
        for k, (x, y) in enumerate(zip(one.x, one.y, strict=True)):
            if plot.log and x <= 0:
                continue
            spread = f" ± {short_number(one.spread[k])}" if one.spread else ""
            said.setdefault(x, []).append([i, f"{one.name}: {short_number(y)}{spread}"])
            place.setdefault(x, frame.at(x, y)[1])
    head = plot.x.split(" (")[0].split(",")[0]
    return [
        [round(frame.at(x, 0)[0], 1), round(place[x], 1), f"{head} {short_number(x)}", said[x]] for x in sorted(said)
    ]


def _svg_points(plot: Plot) -> DrawnPlot:
    frame = _plot_frame(plot, 30)
    out, stops = _svg_axes(plot, frame), []
    if len(plot.front) > 1:
        out.append(f'<path class="front" d="{_svg_path([frame.at(x, y) for x, y in plot.front])}"/>')
    places = [frame.at(one.x[0], one.y[0]) for one in plot.series]
    taken = [(x - 7, x + 7, y) for x, y in places]
    names = distinct_labels([one.name for one in plot.series], 26) if not has_legend(plot) else [""] * len(plot.series)
    for i, (one, name, (px, py)) in enumerate(zip(plot.series, names, places, strict=True)):
        whisker = ""
        if one.spread:
            high, low = (frame.at(one.x[0], one.y[0] + k * one.spread[0])[1] for k in (1, -1))
            whisker = svg_rule(px, high, px, low, "whisker")
        label = ""
        if name:
            start, y = _free_label_place(px, py, len(name) * _BOLD_WIDTH, taken)
            taken.append((start, start + len(name) * _BOLD_WIDTH, y))
            label = svg_text(start, y + 4, name, "name")
        kind = "hole" if one.hollow else "point"
        mark = f'<path class="{kind}" transform="translate({px:.1f} {py:.1f})" d="{mark_shape(one.tint)}"/>'
        out.append(f'<g class="{tint_classes(one.tint)}" data-series="{i}">{whisker}{mark}{label}</g>')
        spread = f" ± {short_number(one.spread[0])}" if one.spread else ""
        said = f"{short_number(one.y[0])}{spread} for {short_number(one.x[0])} MB"
        stops.append([round(px, 1), round(py, 1), one.name, [[i, said]]])
    return DrawnPlot(svg_document(out, _SVG_HEIGHT, plot), SVG_WIDTH, sorted(stops, key=lambda stop: stop[0]))


def _free_label_place(
    px: float, py: float, width: float, taken: list[tuple[float, float, float]]
) -> tuple[float, float]:
    """Where a label fits: to the right, to the left, or a little higher or lower; taken are (from, to, y)."""
    shifts = [0.0, *(k * step for step in range(8, 80, 4) for k in (1, -1))]
    for dy in shifts:
        for start in (px + 10, px - 10 - width):
            fits = start >= 2 and start + width <= SVG_WIDTH - 2 and 30 <= py + dy <= _SVG_HEIGHT - 52
            if fits and not any(
                start < b and a < start + width and abs(py + dy - y) < LINE_HEIGHT - 2 for a, b, y in taken
            ):
                return start, py + dy
    return px + 10, py


def svg_document(parts: list[str], high: float, plot: Plot, wide: int = SVG_WIDTH) -> str:
    """Decoration only: the page names the picture and offers its numbers."""
    cursor = '<g class="cursor" hidden="hidden"></g>'
    return (
        f'<svg viewBox="0 0 {wide} {high:.0f}" xmlns="http://www.w3.org/2000/svg" aria-hidden="true" '
        f'data-kind="{plot.kind}">{"".join(parts)}{cursor}</svg>'
    )


def draw_svg(plot: Plot) -> DrawnPlot:
    from sparing.reports import svg_rows  # draws with what is above

    drawers: dict[str, Callable[[Plot], DrawnPlot]] = {
        "lines": _svg_lines,
        "points": _svg_points,
        "bars": svg_rows.svg_bars,
        "strips": svg_rows.svg_strips,
        "heat": svg_rows.svg_heat,
    }
    return drawers[plot.kind](plot)
