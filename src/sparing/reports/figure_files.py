"""The same figures as files for a paper: PNG, SVG or PDF, drawn by matplotlib."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from sparing.reports.figure import Figure, Plot, Series, has_many, one_legend, short_number
from sparing.reports.split_picture import _PALE_COLOUR, INK_COLOUR, RULE_COLOUR, ink_colormap
from sparing.reports.svg import dash_index as turn

_SERIES_COLOURS = (
    "#0067a5", "#c44900", "#00795a", "#a83e81", "#8a6100", "#7a0c1e",
    "#4d4d4d", "#6a3d9a", "#0a93ab", "#ec3a78", "#5f7d00", "#0d1b66",
)  # fmt: skip
_SERIES_DASHES = (
    "-",
    (0, (6, 2)),
    (0, (3, 1.5)),
    (0, (7, 2, 1.5, 2)),
    (0, (4, 4)),
    (0, (1.5, 1.5)),
    (0, (9, 2)),
    (0, (4, 1.5, 1, 1.5)),
    (0, (8, 2, 3.5, 2)),
    (0, (2, 2.5)),
    (0, (10, 2, 1.5, 2, 1.5, 2)),
    (0, (5, 1.5, 0.7, 1.5)),
)
_SERIES_MARKERS = "osD^vPXd<>hp"
_SIGNED_COLORMAP = LinearSegmentedColormap.from_list(
    "signed", ["#7d3200", "#d99058", "#f4f4f4", "#69a2cd", "#0c3f74"]
).with_extremes(bad="white")
_HANDLE_LENGTH = 3.6  # of a line in a legend: room for its dashes
_MATPLOTLIB_STYLE = {"svg.hashsalt": "sparing", "svg.fonttype": "none", "pdf.fonttype": 42, "font.size": 9}


def write_figures(figures: Sequence[Figure], folder: Path, formats: Sequence[str]) -> list[Path]:
    """KEY.png and so on, each with all plots of a figure. The same runs give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with rc_context(_MATPLOTLIB_STYLE):  # pyright: ignore[reportArgumentType]
        for figure in figures:
            canvas = draw_figure(figure)
            for kind in formats:
                aside: dict[str, Any] = {
                    "png": {"Software": None},
                    "svg": {"Date": None},
                    "pdf": {"CreationDate": None},
                }
                paths.append(folder / f"{figure.key}.{kind}")
                canvas.savefig(paths[-1], format=kind, dpi=200, metadata=aside[kind])
    return paths


def draw_figure(figure: Figure) -> Canvas:
    """Line plots side by side; many maps in a grid."""
    columns = min(len(figure.plots), 4 if any(plot.kind == "heat" for plot in figure.plots) else 2)
    cells = _grid_places(figure.plots, columns)
    columns, rows = max(j for _, j in cells) + 1, cells[-1][0] + 1
    wide = 3.4 if columns > 2 else 5.2
    tall = max(_plot_height(plot, wide) for plot in figure.plots)
    canvas = Canvas(figsize=(wide * columns, tall * rows), layout="constrained", facecolor="white")
    told = [plot for plot in figure.plots if plot.kind in ("lines", "points", "bars") and len(plot.series) > 1]
    shared = one_legend(told) if len(told) > 1 else None
    for i, plot in enumerate(figure.plots):
        ax = canvas.add_subplot(rows, columns, cells[i][0] * columns + cells[i][1] + 1)
        {"lines": _draw_lines, "points": _draw_points, "bars": _draw_bars, "strips": _draw_strips, "heat": _draw_heat}[
            plot.kind
        ](ax, plot)
        if shared is None and plot in told:
            _draw_legend(ax, plot, wide)
        ax.set_title(fill(plot.title, int(9 * wide)), size=9.5, color=INK_COLOUR, loc="left")
        ax.set_xlabel(plot.x, color=INK_COLOUR)
        ax.set_ylabel(plot.y, color=INK_COLOUR)
        ax.tick_params(color=RULE_COLOUR, labelcolor=_PALE_COLOUR, labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(RULE_COLOUR)
    if shared is not None:
        with_keys = canvas.axes[figure.plots.index(shared)]
        canvas.legend(
            *with_keys.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=_legend_columns(shared, wide * columns, 4),
            frameon=False,
            fontsize=7.5,
            labelcolor=INK_COLOUR,
            handlelength=_HANDLE_LENGTH,
        )
    canvas.suptitle(
        fill(figure.title, int(10 * wide * columns)), size=11.5, weight="bold", color=INK_COLOUR, x=0.01, ha="left"
    )
    return canvas


def _grid_places(plots: Sequence[Plot], columns: int) -> list[tuple[int, int]]:
    """Row and column of each; a row ends when it is full, where a plot begins another, and after a method's maps."""
    out = [(0, 0)]
    for before, plot in pairwise(plots):
        row, column = out[-1]
        turn = column + 1 == columns or plot.fresh or (before.kind == "heat" and plot.kind != "heat")
        out.append((row + 1, 0) if turn else (row, column + 1))
    return out


def _series_colour(one: Series) -> dict[str, Any]:
    return {"color": _SERIES_COLOURS[one.tint % len(_SERIES_COLOURS)]}


def _draw_lines(ax: Axes, plot: Plot) -> None:
    for one in plot.series:
        dash = (0, (1.5, 2.5)) if one.hollow else _SERIES_DASHES[turn(one.tint)]
        ax.plot(one.x, one.y, linestyle=dash, linewidth=1.6, label=one.name, **_series_colour(one))
        if one.spread:
            y, s = np.array(one.y), np.array(one.spread)
            low = np.maximum(y - s, y / 1e3) if plot.log_y else y - s
            ax.fill_between(
                one.x, low, y + s, alpha=0.06 if has_many(plot) else 0.13, linewidth=0, **_series_colour(one)
            )
    if plot.log:
        _scale_in_decades(ax)
    else:
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=plot.x == "round"))
    if plot.log_y:
        ax.set_yscale("log")
        ax.set_ylim(bottom=min(y for one in plot.series for y in one.y) / 1.15)
        _tick_decades(ax.yaxis, *ax.get_ylim())
    ax.grid(axis="y", color="#e4e8ec", linewidth=0.6)
    ax.set_axisbelow(True)


def _draw_points(ax: Axes, plot: Plot) -> None:
    if len(plot.front) > 1:
        ax.plot(*zip(*plot.front, strict=True), color=RULE_COLOUR, linestyle=(0, (4, 4)), linewidth=1, zorder=1)
    for one in plot.series:
        fill = "white" if one.hollow else _series_colour(one)["color"]
        shape = _SERIES_MARKERS[turn(one.tint)]
        ax.errorbar(
            one.x, one.y, one.spread, marker=shape, markerfacecolor=fill, ls="", label=one.name, **_series_colour(one)
        )
    _scale_in_decades(ax)
    ax.margins(x=0.1, y=0.1)


def _plot_height(plot: Plot, wide: float) -> float:
    """Inches: a line for each row, and for each row of a long key."""
    if plot.kind == "heat":
        return 3.2
    rows = len(plot.rows) or (len(plot.series) if plot.kind == "strips" else 0)
    return max(3.2, 0.28 * rows) + 0.17 * max(0, -(-len(plot.series) // _legend_columns(plot, wide)) - 3)


def _legend_columns(plot: Plot, wide: float, most: int = 3) -> int:
    """As many as there is room for, by the longest name."""
    longest = max(len(one.name) for one in plot.series)
    return max(1, min(most if len(plot.series) > 4 else 2, int(16 * wide / (longest + 6))))


def _draw_legend(ax: Axes, plot: Plot, wide: float) -> None:
    """Below the plot, where it hides nothing."""
    where: Any = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2), "ncols": _legend_columns(plot, wide)}
    ax.legend(frameon=False, fontsize=7.5, labelcolor=INK_COLOUR, handlelength=_HANDLE_LENGTH, **where)


def _scale_in_decades(ax: Axes) -> None:
    ax.set_xscale("log")
    _tick_decades(ax.xaxis, *ax.get_xlim())


def _tick_decades(axis: Axis, low: float, high: float) -> None:
    decades = np.log10(high / low)
    axis.set_major_locator(
        LogLocator(10, subs=(1, 2, 3, 4, 6, 8) if decades < 1 else (1, 2, 5) if decades < 2.5 else (1,))
    )
    axis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
    axis.set_minor_formatter(NullFormatter())


def _draw_bars(ax: Axes, plot: Plot) -> None:
    start = np.zeros(len(plot.rows))
    for one in plot.series:
        ax.barh(range(len(plot.rows)), one.y, 0.7, left=start, label=one.name, **_series_colour(one))
        start += np.array(one.y)
    ax.set_yticks(range(len(plot.rows)), plot.rows)
    ax.invert_yaxis()


def _draw_strips(ax: Axes, plot: Plot) -> None:
    for i, one in enumerate(plot.series):
        offset = 0.6 * (np.arange(len(one.y)) * 0.6180339887 % 1 - 0.5)
        ax.plot(one.y, i + offset, ".", alpha=0.35, markeredgewidth=0, **_series_colour(one))
        low, half, high = np.quantile(one.y, (0.25, 0.5, 0.75))
        ax.barh(i, high - low, 0.45, left=low, fill=False, edgecolor=_series_colour(one)["color"])
        ax.vlines(half, i - 0.32, i + 0.32, linewidth=2.2, **_series_colour(one))
    ax.set_yticks(range(len(plot.series)), [one.name for one in plot.series])
    ax.invert_yaxis()


def _draw_heat(ax: Axes, plot: Plot) -> None:
    values = np.array([[np.nan if x is None else x for x in row] for row in plot.values], dtype=float)
    low, high = plot.scale or (None, None)
    colours = _SIGNED_COLORMAP if plot.signed else ink_colormap()
    image = ax.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", interpolation="nearest")
    for axis, names in ((ax.yaxis, plot.rows), (ax.xaxis, plot.columns)):
        every = max(1, -(-len(names) // 12))
        axis.set_ticks(range(0, len(names), every), names[::every])
    assert ax.figure is not None
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.05)
    bar.ax.tick_params(labelsize=7, length=0)
    bar.outline.set_visible(False)  # pyright: ignore
