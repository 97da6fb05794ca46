"""The report as one HTML file: no network, no other file."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

import sparing
from sparing.reports import inside_figures, method_figures, snapshot_figures
from sparing.reports.arrangement import groups_by_task, ranking_of_task
from sparing.reports.comparison import Comparison
from sparing.reports.comparison_tables import TextTable, mark_legend, tables_of_comparison
from sparing.reports.figure import Figure, Plot, Series, counted_word, has_legend, one_legend, with_minus
from sparing.reports.headline import headlines
from sparing.reports.report_runs import missing_file_notes, read_groups
from sparing.reports.run_folders import RunGroup, differing_keys
from sparing.reports.run_folders import setting_text as worded
from sparing.reports.svg import draw_svg, mark_shape, tint_classes

_FIGURES = (
    ("{metric} against bytes", method_figures.pareto_figure),
    ("By megabytes", method_figures.result_by_bytes),
    ("{metric} by round", method_figures.result_by_round),
    ("By time", method_figures.result_by_clock),
    ("Clients", method_figures.result_by_client),
    ("Stability", method_figures.stability_figure),
    ("Bytes", method_figures.bytes_figure),
    ("Masks", inside_figures.coverage_figure),
    ("Sizes", snapshot_figures.sizes_figure),
    ("Low rank", inside_figures.approximation_figure),
    ("Similarity", snapshot_figures.similarity_figure),
    ("Shrinkage", inside_figures.shrinkage_figure),
    ("Pruned", inside_figures.pruned_figure),
    ("Thresholds", inside_figures.thresholds_figure),
    ("Updates", snapshot_figures.updates_figure),
    ("Privacy", inside_figures.epsilon_figure),
    ("The split", snapshot_figures.split_figure),
)


def report_figures(groups: Sequence[RunGroup]) -> list[tuple[str, Figure]]:
    """Those that these runs have data for, each with a word for a list of them; every task has plots of its own."""
    methods = _group_methods(groups)
    tasks = {}
    for task, some in groups_by_task(groups).items():
        seen = read_groups([group._replace(label=group.method or group.label) for group in some])
        tasks[task] = [one._replace(tint=methods.index(one.label)) for one in seen]
    made = [(word, _figure_of_tasks({task: make(seen) for task, seen in tasks.items()})) for word, make in _FIGURES]
    titles = {seen[0].ranking.title for seen in tasks.values()}
    metric = titles.pop() if len(titles) == 1 else "Results"
    return [(word.format(metric=metric), figure) for word, figure in made if figure is not None]


def _figure_of_tasks(made: dict[str, Figure | None]) -> Figure | None:
    """The same figure of several tasks as one, the task's name before each plot's title."""
    found = {task: figure for task, figure in made.items() if figure is not None}
    if not found or len(made) == 1:
        return next(iter(found.values()), None)
    plots, tables = [], []
    for task, figure in found.items():
        plots += [plot._replace(title=f"{task}: {plot.title}".rstrip(": ")) for plot in figure.plots]
        tables += [table._replace(title=f"{task}: {table.title}") for table in figure.tables]
    first = next(iter(found.values()))
    told = [f"{task}: {said}" for task, figure in found.items() if (said := figure.title.partition(": ")[2])]
    title = "; ".join([first.title.partition(": ")[0], *told])
    return Figure(first.key, title, first.read, plots, tables)


def report_page(groups: Sequence[RunGroup], found: Comparison, made: Sequence[tuple[str, Figure]]) -> str:
    """The first figure and the answer open the page, then the tables, then the other figures."""
    here = files("sparing.reports")
    css, js, text = ((here / name).read_text(encoding="utf-8") for name in ("page.css", "page.js", "page.html"))
    runs = [run for group in groups for run in group.runs]
    figures = [_figure_context(word, figure) for word, figure in made]
    page = Environment(autoescape=True)
    page.filters["with_minus"] = with_minus
    return page.from_string(text).render(
        title=_report_title(groups),
        about=_report_subtitle(groups),
        caution=_validation_caution(groups),
        css=Markup(css),
        js=Markup(js),
        answers=headlines(found),
        sheets=tables_of_comparison(found),
        marks=mark_legend(found),
        notes=[*found.notes, *missing_file_notes(runs)],
        opening=figures[:1],
        figures=figures[1:],
        settings=_settings_table(groups),
        version=sparing.__version__,
        runs=counted_word(len(runs), "run folder"),
    )


def _report_title(groups: Sequence[RunGroup]) -> str:
    tasks = list(dict.fromkeys(group.task or group.runs[0].data for group in groups))
    methods = _group_methods(groups)
    what = methods[0] if len(methods) == 1 else f"{len(methods)} methods"
    return f"{what} on {', '.join(tasks)}"


def _group_methods(groups: Sequence[RunGroup]) -> list[str]:
    return list(dict.fromkeys(group.method or group.label for group in groups))


def _report_subtitle(groups: Sequence[RunGroup]) -> str:
    rounds = list(dict.fromkeys(len(group.runs[0].table) for group in groups))
    seeds = list(dict.fromkeys(len(group.runs) for group in groups))
    each = " each" if len(groups) > 1 else ""
    said = ", ".join(_group_methods(groups))
    return f"{_either_count(rounds, 'round')}, {_either_count(seeds, 'seed')}{each}: {said}."


def _either_count(counts: list[int], word: str) -> str:
    """
    >>> _either_count([1], "seed"), _either_count([3, 1], "seed")
    ('1 seed', '3 or 1 seeds')
    """
    return counted_word(counts[0], word) if len(counts) == 1 else f"{' or '.join(map(str, counts))} {word}s"


def _validation_caution(groups: Sequence[RunGroup]) -> str:
    """Said at the top where accuracy is not that of test samples."""
    aside = [group.label for group in groups if group.runs[0].settings.get("evaluate.set") == "validation"]
    if not aside:
        return ""
    whose = "" if len(aside) == len(groups) else f" of {', '.join(aside)}"
    by_accuracy = all(ranking_of_task(some).by_accuracy for some in groups_by_task(groups).values())
    what = "Accuracies and losses" if by_accuracy else "Results"
    return f"{what}{whose} are on validation samples, which settings may have been chosen by."


def _settings_table(groups: Sequence[RunGroup]) -> TextTable:
    """What all share in one column; what differs by method in the others."""
    about = [group.runs[0].settings for group in groups]
    apart = differing_keys(about)
    keys = list(dict.fromkeys(key for one in about for key in one))
    rows = [[key, worded(about[0].get(key)), *[""] * len(groups)] for key in keys if key not in apart]
    rows += [[key, "", *(worded(one[key]) if key in one else "" for one in about)] for key in apart]
    if len(groups) == 1:
        rows = [row[:2] for row in rows]
    names = [group.label for group in groups] if len(groups) > 1 else []
    return TextTable("Settings", ["key", "all" if names else "value", *names], rows)


def _figure_context(word: str, figure: Figure) -> dict[str, Any]:
    """What the template needs of a figure. Plots with the same series have one legend, the first one's."""
    ids = [f"{figure.key}-{i}" for i in range(len(figure.tables))]
    maps = any(plot.kind == "heat" for plot in figure.plots)
    shared = one_legend([plot for plot in figure.plots if has_legend(plot)])
    plots = [
        _plot_context(figure, plot, ids[min(i, len(ids) - 1)], legend=not shared) for i, plot in enumerate(figure.plots)
    ]
    tables = list(zip(ids, figure.tables, strict=True))
    return {"nav": word, "key": figure.key, "title": figure.title, "read": figure.read} | {
        "maps": maps,
        "legend": _legend_context(shared) if shared else [],
        "plots": plots,
        "tables": tables,
    }


def _plot_context(figure: Figure, plot: Plot, table: str, legend: bool) -> dict[str, Any]:
    picture = draw_svg(plot)
    axes = " by ".join(dict.fromkeys(word for word in (plot.y, plot.x) if word))
    names = [one.name for one in plot.series]
    data = json.dumps({"mode": picture.mode, "stops": picture.stops, "names": names}).replace("<", "\\u003c")
    return {
        "title": plot.title,
        "table": table,
        "wide": plot.kind != "heat",
        "fresh": plot.fresh,
        "legend": _legend_context(plot) if legend and has_legend(plot) else [],
        "label": f"{plot.title or figure.title}: {axes}. Arrow keys read the values.",
        "svg": Markup(picture.svg),
        "stops": Markup(data),
    }


def _legend_context(plot: Plot) -> list[tuple[str, str, Markup]]:
    return [(one.name, tint_classes(one.tint), _legend_chip(plot, one)) for one in plot.series]


def _legend_chip(plot: Plot, one: Series) -> Markup:
    """What a legend shows of a line, or of a part of bars."""
    if plot.kind == "points":
        wide, body = 14, f'<path class="point" transform="translate(7 5) scale(.8)" d="{mark_shape(one.tint)}"/>'
    elif plot.kind == "bars":
        wide, body = 10, '<path class="block" d="M0 0h10v10H0z"/>'
    else:
        wide, body = 30, f'<path class="line{" dashed" if one.hollow else ""}" d="M0 5h30"/>'
    return Markup(f'<svg class="chip" viewBox="0 0 {wide} 10" aria-hidden="true">{body}</svg>')
