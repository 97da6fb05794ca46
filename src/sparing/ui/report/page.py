"""The report as one HTML file: no network, no other file."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

import sparing
from sparing.run.compare import Comparison
from sparing.run.gather import Group, differing
from sparing.run.gather import shown as worded
from sparing.ui.compare import Sheet, sheets
from sparing.ui.report import curves, insides, views
from sparing.ui.report.figure import Figure, Plot, Series, counted
from sparing.ui.report.reading import Members, members, missing
from sparing.ui.report.svg import draw, tint

FIGURES = (
    ("Accuracy by round", curves.by_round),
    ("By megabytes", curves.by_bytes),
    ("By time", curves.by_clock),
    ("Pareto front", curves.pareto),
    ("Clients", curves.by_client),
    ("Stability", curves.stability),
    ("Bytes", curves.bytes_sent),
    ("Masks", insides.coverage),
    ("Sizes", views.sizes),
    ("Low rank", insides.approximation),
    ("Similarity", views.similarity),
    ("Shrinkage", insides.shrinkage),
    ("Pruned", insides.pruned),
    ("Thresholds", insides.thresholds),
    ("Updates", views.updates),
    ("Privacy", insides.epsilon),
    ("The split", views.split),
)


def figures(groups: Sequence[Group]) -> list[tuple[str, Figure]]:
    """Those that these runs have data for, each with a word for a list of them."""
    seen: list[Members] = members(list(groups))
    made = [(word, make(seen)) for word, make in FIGURES]
    return [(word, figure) for word, figure in made if figure is not None]


def page(groups: Sequence[Group], found: Comparison, made: Sequence[tuple[str, Figure]]) -> str:
    here = files("sparing.ui.report")
    css, js, text = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html"))
    runs = [run for group in groups for run in group.runs]
    return (
        Environment(autoescape=True)
        .from_string(text)
        .render(
            title=title_of(groups),
            about=about(groups),
            caution=caution(groups),
            css=Markup(css),
            js=Markup(js),
            sheets=sheets(found),
            notes=[*found.notes, *missing(runs)],
            figures=[shown(word, figure) for word, figure in made],
            settings=settings(groups),
            version=sparing.__version__,
            runs=counted(len(runs), "run folder"),
        )
    )


def title_of(groups: Sequence[Group]) -> str:
    data = dict.fromkeys(worded(group.runs[0].settings["task.data"]) for group in groups)
    what = groups[0].label if len(groups) == 1 else f"{len(groups)} methods"
    return f"{what} on {', '.join(data)}"


def about(groups: Sequence[Group]) -> str:
    rounds = list(dict.fromkeys(len(group.runs[0].table) for group in groups))
    seeds = list(dict.fromkeys(len(group.runs) for group in groups))
    each = " each" if len(groups) > 1 else ""
    said = ", ".join(group.label for group in groups)
    return f"{either(rounds, 'round')}, {either(seeds, 'seed')}{each}: {said}."


def either(counts: list[int], word: str) -> str:
    """
    >>> either([1], "seed"), either([3, 1], "seed")
    ('1 seed', '3 or 1 seeds')
    """
    return counted(counts[0], word) if len(counts) == 1 else f"{' or '.join(map(str, counts))} {word}s"


def caution(groups: Sequence[Group]) -> str:
    """Said at the top where accuracy is not that of test samples."""
    aside = [group.label for group in groups if group.runs[0].settings.get("evaluate.set") == "validation"]
    if not aside:
        return ""
    whose = "" if len(aside) == len(groups) else f" of {', '.join(aside)}"
    return f"Accuracies and losses{whose} are on validation samples, which settings may have been chosen by."


def settings(groups: Sequence[Group]) -> Sheet:
    """What all share in one column; what differs by method in the others."""
    about = [group.runs[0].settings for group in groups]
    apart = differing(about)
    keys = list(dict.fromkeys(key for one in about for key in one))
    rows = [[key, worded(about[0][key]), *[""] * len(groups)] for key in keys if key not in apart]
    rows += [[key, "", *(worded(one[key]) if key in one else "" for one in about)] for key in apart]
    if len(groups) == 1:
        rows = [row[:2] for row in rows]
    names = [group.label for group in groups] if len(groups) > 1 else []
    return Sheet("Settings", ["key", "all" if names else "value", *names], rows)


def shown(word: str, figure: Figure) -> dict[str, Any]:
    """What the template needs of a figure."""
    ids = [f"{figure.key}-{i}" for i in range(len(figure.tables))]
    maps = any(plot.kind == "heat" for plot in figure.plots)
    plots = [drawn(figure, plot, ids[min(i, len(ids) - 1)]) for i, plot in enumerate(figure.plots)]
    tables = list(zip(ids, figure.tables, strict=True))
    return {"nav": word, "key": figure.key, "title": figure.title, "read": figure.read} | {
        "maps": maps,
        "plots": plots,
        "tables": tables,
    }


def drawn(figure: Figure, plot: Plot, table: str) -> dict[str, Any]:
    picture = draw(plot)
    legend = plot.series if plot.kind in ("lines", "bars") and len(plot.series) > 1 else []
    axes = " by ".join(dict.fromkeys(word for word in (plot.y, plot.x) if word))
    data = json.dumps({"mode": picture.mode, "stops": picture.stops}).replace("<", "\\u003c")
    return {
        "title": plot.title,
        "table": table,
        "wide": plot.kind != "heat",
        "fresh": plot.fresh,
        "legend": [(one.name, tint(one.tint), chip(plot, one)) for one in legend],
        "label": f"{plot.title or figure.title}: {axes}. Arrow keys read the values.",
        "svg": Markup(picture.svg),
        "stops": Markup(data),
    }


def chip(plot: Plot, one: Series) -> Markup:
    """What a legend shows of a line, or of a part of bars."""
    line = f'<path class="line{" dashed" if one.hollow else ""}" d="M0 5h30"/>'
    wide, body = (10, '<path class="block" d="M0 0h10v10H0z"/>') if plot.kind == "bars" else (30, line)
    return Markup(f'<svg class="chip" viewBox="0 0 {wide} 10" aria-hidden="true">{body}</svg>')
