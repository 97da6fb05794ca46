"""Who holds what, as a picture: sizes above, a map of labels by clients below."""

from pathlib import Path
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from sparing.split.summary import SplitReport

_TRAIN_COLOUR, _VALIDATION_COLOUR, _TEST_COLOUR, _HELD_OUT_COLOUR = (
    "#1f4e79",
    "#009e73",
    "#9cc3e0",
    "#d55e00",
)  # safe for colour-blind readers
INK_COLOUR, _PALE_COLOUR, RULE_COLOUR = "#222222", "#666666", "#bbbbbb"
_MOST_IN_ORDER = 60  # up to so many clients stand in their own order; more are ranked by size
_MOST_NAMED = 25  # clients at most that are called by name
_MOST_LISTED = 40  # labels at most that are called by name
_MOST_COLUMNS = 900  # of the map at most
_MOST_NUMBERED = 160  # cells at most that also show their count
_COLOUR_SCALES = (0.1, 0.25, 0.5, 1.0)  # a few common colour scales, so that pictures can be compared
_LETTER_INCHES = 0.068  # inches


def draw_split(report: SplitReport, path: str | Path) -> Path:
    """Draw a split and save it as PNG."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _split_figure(report).savefig(path, dpi=200, format="png", metadata={"Software": None})
    return path


def _split_figure(report: SplitReport) -> Figure:
    """All in inches: a fixed frame around a map that is as high as its labels need."""
    labels, clients = report.counts.shape
    wide, high = 9.0 if clients > 8 else 7.0, min(max(labels * 0.24, 1.4), 5.0)
    left, right = max(0.85, 0.5 + _LETTER_INCHES * _longest_word(report.labels) if labels <= _MOST_LISTED else 0), 1.0
    names = _client_names(report)
    slanted = bool(names) and _LETTER_INCHES * _longest_word(names) > 0.95 * (wide - left - right) / clients
    text = wrap(_split_caption(report), int((wide - left - 0.2) / _LETTER_INCHES * 1.08))
    foot = (0.72 * _LETTER_INCHES * _longest_word(names) + 0.12 if slanted else 0.5) + 0.3 + 0.17 * len(text)
    total = foot + high + 0.12 + 1.15 + 0.75
    fig = Figure(figsize=(wide, total), facecolor="white")

    def axes(x: float, y: float, w: float, h: float) -> Axes:
        return fig.add_axes((x / wide, y / total, w / wide, h / total))

    below = axes(left, foot, wide - left - right, high)
    above = axes(left, foot + high + 0.12, wide - left - right, 1.15)
    shown = _shown_clients(report)
    _draw_sizes(above, report, shown)
    _draw_label_map(below, axes(wide - right + 0.14, foot, 0.14, high), report, shown)
    _name_clients(below, names, slanted, clients)
    for ax in (above, below):
        ax.set_xlim(-0.5, clients - 0.5)
        ax.yaxis.set_label_coords(-(left - 0.2) / (wide - left - right), 0.5)
    title = f"{report.data}, split by {report.law}"
    size = min(13, 13 * (wide - left - 0.1) / (1.85 * _LETTER_INCHES * len(title)))
    fig.text(left / wide, 1 - 0.36 / total, title, size=size, weight="bold", color=INK_COLOUR)
    fig.text(left / wide, 0.14 / total, "\n".join(text), size=8.5, color=_PALE_COLOUR, va="bottom", linespacing=1.35)
    return fig


def _shown_clients(report: SplitReport) -> np.ndarray:
    """The clients of the picture from left to right: all, or every so many-th of very many."""
    ranked = np.argsort(-report.sizes, kind="stable") if report.clients > _MOST_IN_ORDER else np.arange(report.clients)
    return ranked[np.linspace(0, report.clients - 1, min(report.clients, _MOST_COLUMNS)).round().astype(int)]


def _draw_sizes(ax: Axes, report: SplitReport, shown: np.ndarray) -> None:
    edges = np.linspace(-0.5, report.clients - 0.5, len(shown) + 1)
    middle, base, key = (edges[1:] + edges[:-1]) / 2, np.zeros(len(shown)), []
    stacked = (
        ("train", report.train, _TRAIN_COLOUR),
        ("validation", report.validation, _VALIDATION_COLOUR),
        ("test", report.test, _TEST_COLOUR),
    )
    for name, size, colour in stacked:
        if not size.any():
            continue
        if report.clients <= _MOST_IN_ORDER:
            ax.bar(middle, size[shown], 0.82, base, color=colour, linewidth=0)
        else:
            ax.stairs(base + size[shown], edges, baseline=base, fill=True, color=colour, linewidth=0)
        base = base + size[shown]
        key.append(Patch(color=colour, label=name))
    if len(report.held_out):
        out = np.isin(shown, report.held_out)
        mark: dict[str, Any] = {"marker": "v", "linestyle": "", "color": _HELD_OUT_COLOUR, "markeredgewidth": 0}
        ax.plot(middle[out], base[out] + 0.07 * base.max(), ms=4.5 if report.clients <= _MOST_IN_ORDER else 3, **mark)
        key.append(Line2D([], [], ms=5, label="held out", **mark))
    ax.set_ylim(0, base.max() * (1.18 if len(report.held_out) else 1.05))
    ax.set_ylabel("samples", color=INK_COLOUR)
    ax.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    ax.yaxis.set_major_formatter("{x:,.0f}")
    ax.grid(axis="y", color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(RULE_COLOUR)
    ax.tick_params(axis="x", bottom=False, labelbottom=False)
    ax.tick_params(axis="y", color=RULE_COLOUR, labelcolor=INK_COLOUR, labelsize=8.5)
    ax.legend(
        handles=key,
        loc="lower right",
        bbox_to_anchor=(1.01, 0.99),
        ncols=4,
        frameon=False,
        fontsize=8.5,
        handlelength=0.9,
        handleheight=0.9,
        columnspacing=1.2,
        borderpad=0.1,
    )


def _draw_label_map(ax: Axes, scale: Axes, report: SplitReport, shown: np.ndarray) -> None:
    """Each column is one client: the shares of its samples by label."""
    labels, clients = report.counts.shape
    rows = np.arange(labels)
    if labels > _MOST_LISTED:  # too many to be read one by one: those of the same client side by side
        rows = np.argsort(report.counts.argmax(1), kind="stable")
    counts = report.counts[np.ix_(rows, shown)]
    share = counts / counts.sum(0)
    most = next(top for top in _COLOUR_SCALES if np.quantile(share.max(0), 0.98) <= top)
    image = ax.imshow(
        np.where(share > 0, share, np.nan),
        cmap=ink_colormap(),
        vmin=0,
        vmax=most,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, clients - 0.5, labels - 0.5, -0.5),
    )
    ax.spines[:].set_color(RULE_COLOUR)
    ax.spines[:].set_linewidth(0.6)
    if labels <= _MOST_LISTED:
        ax.set_ylabel("label", color=INK_COLOUR)
        ax.set_yticks(range(labels), report.labels)
    else:
        ax.set_ylabel("labels, by who holds most of each", color=INK_COLOUR)
        ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    if labels <= _MOST_LISTED and clients <= _MOST_IN_ORDER:
        ax.vlines(np.arange(1, clients) - 0.5, -0.5, labels - 0.5, color="white", linewidth=0.8)
        ax.hlines(np.arange(1, labels) - 0.5, -0.5, clients - 0.5, color="white", linewidth=0.8)
    if counts.size <= _MOST_NUMBERED:
        for (row, column), n in np.ndenumerate(counts):
            colour = "white" if share[row, column] > 0.57 * most else INK_COLOUR
            ax.text(column, row, f"{n:,}" if n else "", ha="center", va="center", size=7.5, color=colour)
    bar = ax.figure.colorbar(image, cax=scale, extend="max" if share.max() > most else "neither", extendfrac=0.04)
    ticks = [most * i / 5 for i in range(6)]
    bar.set_ticks(ticks, labels=[f"{100 * tick:.3g} %" for tick in ticks])
    bar.ax.tick_params(length=0, labelsize=8, labelcolor=INK_COLOUR)
    bar.set_label("share of the client's samples", size=8.5, color=INK_COLOUR)
    bar.outline.set_visible(False)


def _name_clients(ax: Axes, names: list[str], slanted: bool, clients: int) -> None:
    """By name where there is room for it, by number where there are few, by rank where there are many."""
    ax.tick_params(length=0, labelsize=8.5, labelcolor=INK_COLOUR)
    ax.set_xlabel("client", color=INK_COLOUR)
    if slanted:
        ax.set_xticks(range(clients), names, rotation=45, ha="right", rotation_mode="anchor")
        ax.set_xlabel("")
    elif names:
        ax.set_xticks(range(clients), names)
    elif clients <= _MOST_IN_ORDER:
        ax.set_xticks(range(0, clients, 5))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        thinned = f" (one in {clients / _MOST_COLUMNS:.0f} is shown)" if clients > 1.5 * _MOST_COLUMNS else ""
        ax.set_xlabel(f"clients, largest first{thinned}", color=INK_COLOUR)


def _client_names(report: SplitReport) -> list[str]:
    if report.clients > _MOST_NAMED:
        return []
    names = report.names or [str(k) for k in range(report.clients)]
    return [name if len(name) <= 34 else name[:33] + "…" for name in names]


def _longest_word(words: list[str]) -> int:
    return max(map(len, words), default=0)


def ink_colormap() -> Colormap:
    """White paper for nothing, then ever darker blue, which also reads in grey."""
    stops = ["#e3eef6", "#a6cbe3", "#5b9fcb", "#2268a5", "#0b2f5c"]
    return LinearSegmentedColormap.from_list("ink", stops).with_extremes(bad="white", over="#051a36")


def _split_caption(report: SplitReport) -> str:
    """The split in one sentence."""
    size, classes = report.sizes, report.classes
    each = f"{size.min():,}" if size.min() == size.max() else f"{size.min():,} to {size.max():,}"
    sees = f"{classes.min()}" if classes.min() == classes.max() else f"{classes.min()} to {classes.max()}"
    hold = "client holds" if report.clients == 1 else "clients hold"
    return (
        f"{report.clients:,} {hold} {report.samples:,} samples, {each} each (Gini {report.gini:.2f}), "
        f"with {sees} of {len(report.counts)} labels; a client's labels lie {report.skew:.2f} from everybody's "
        f"in total variation on average ({report.chance:.2f} by chance alone)."
    )
