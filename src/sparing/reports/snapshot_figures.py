"""Figures from the pictures a run keeps: who holds what, who has which size, who is alike, what updates look like."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sparing.reports.comparison_tables import TextTable
from sparing.reports.figure import Figure, Plot, Series, short_number
from sparing.reports.report_runs import GroupContents, RunContents
from sparing.runs.snapshots import Snapshot


def _snapshots_of_kind(one: RunContents, kind: str) -> list[Snapshot]:
    return [picture for picture in one.pictures if picture["kind"] == kind]


def _first_run_with(group: GroupContents, kind: str) -> RunContents:
    """The first seed that has such pictures."""
    return next((one for one in group.seen if _snapshots_of_kind(one, kind)), group.seen[0])


def split_figure(groups: Sequence[GroupContents]) -> Figure | None:
    """One for each split there is, of the first seed that has it."""
    plots, tables, seen, said = [], [], [], ""
    for group in groups:
        one = _first_run_with(group, "split")
        for picture in _snapshots_of_kind(one, "split"):
            if picture in seen:
                continue
            seen.append(picture)
            what = f"{one.run.data}, seed {one.run.seed}"
            clients = [str(i) for i in picture["ids"]]
            said = said or f"{picture['clients']} clients with {short_number(picture['total'])} samples"
            if "values" not in picture:
                size = [float(n) for n in picture["samples"]]
                plots.append(Plot("strips", "training samples of a client", series=[Series(what, size)]))
                tables.append(
                    TextTable(
                        what,
                        ["client", "samples"],
                        [list(x) for x in zip(clients, map(str, picture["samples"]), strict=True)],
                    )
                )
                continue
            counts = np.array(picture["values"]).T
            share = 100 * counts / np.maximum(counts.sum(0), 1)
            labels = [str(i) for i in range(len(counts))]
            values = [[float(x) or None for x in row] for row in share.tolist()]
            plots.append(_heat_plot(values, labels, clients, "client", "label", f"{what}: % of a client's samples"))
            tables.append(
                _values_table(f"Training samples by label and client ({what})", labels, clients, counts.tolist())
            )
    if not plots:
        return None
    return Figure(
        "split",
        f"The split: {said}",
        "Each column is a client: the stronger the colour, the larger the share of its training samples with that "
        "label; empty means none. All maps share one colour scale, from 0.",
        _on_one_scale(plots),
        tables,
    )


def sizes_figure(groups: Sequence[GroupContents]) -> Figure | None:
    plots, tables = [], []
    for group in groups:
        for picture in _snapshots_of_kind(_first_run_with(group, "sizes"), "sizes"):
            names, counts = picture["names"], np.bincount(picture["sizes"], minlength=len(picture["names"]))
            rows = [
                f"{name}: {short_number(n)} parameters" for name, n in zip(names, picture["parameters"], strict=True)
            ]
            bars = [Series("clients", [float(n) for n in counts], tint=group.tint)]
            plots.append(Plot("bars", "clients", series=bars, rows=rows, title=group.label))
            who = [", ".join(str(i) for i, s in enumerate(picture["sizes"]) if s == size) for size in range(len(names))]
            lines = [[name, str(n), said] for name, n, said in zip(rows, counts, who, strict=True)]
            tables.append(TextTable(f"{group.label}: who has which size", ["size", "clients", "which"], lines))
            layers = {layer: n for layer, n in picture["layers"].items() if any(n)}
            values = [[float(x) for x in n] for n in layers.values()]
            share: list[list[float | None]] = [[100 * x / max(max(n), 1) for x in n] for n in values]
            plots.append(_heat_plot(share, list(layers), names, "size", "layer", f"{group.label}: parameters (%)"))
            tables.append(_values_table(f"{group.label}: parameters by layer and size", list(layers), names, values))
    if not plots:
        return None
    return Figure(
        "sizes",
        "Model sizes: which client has which",
        "Bars count clients; the map shows the share of each layer's parameters that a size keeps (0 to 100 %).",
        _on_one_scale(plots),
        tables,
    )


def similarity_figure(groups: Sequence[GroupContents]) -> Figure | None:
    words = {"similarity": "heads, as pFedSim's server sees them", "cosines": "updates of this round, cosine"}
    plots, tables, kinds = [], [], []
    for group in groups:
        for kind, what in words.items():
            one = _first_run_with(group, kind)
            pictures = _snapshots_of_kind(one, kind)
            for k, picture in enumerate([pictures[0], pictures[-1]] if len(pictures) > 1 else pictures):
                ids = [str(i) for i in picture["ids"]]
                where = f"{group.label}, seed {one.run.seed}, round {picture['round']}: {what}"
                values = [[None if i == j else x for j, x in enumerate(row)] for i, row in enumerate(picture["values"])]
                plots.append(
                    _heat_plot(values, ids, ids, "client", "client", where)._replace(
                        signed=kind == "cosines", fresh=k == 0
                    )
                )
                kinds.append(kind)
                tables.append(_values_table(where, ids, ids, picture["values"]))
    if not plots:
        return None
    return Figure(
        "similarity",
        "Similarity between clients",
        "The stronger the blue, the more similar two clients; orange is below 0; empty cells are a client with itself, "
        "or pairs that were never compared. All maps of one measure share a colour scale: symmetric about 0 for "
        "cosines, from the smallest to the largest value for heads.",
        [plot if plot.signed else plot._replace(scale=_value_range(plot for plot in plots if not plot.signed))
         for plot in _on_one_scale(plots, kinds)],
        tables,
    )  # fmt: skip


def _value_range(plots: Iterable[Plot]) -> tuple[float, float]:
    values = [x for plot in plots for row in plot.values for x in row if x is not None] or [0.0, 1.0]
    return min(values), max(values)


def updates_figure(groups: Sequence[GroupContents]) -> Figure | None:
    """Of the first seed of each group that has them."""
    plots, tables, kinds, said = [], [], [], {}
    for group in groups:
        one = _first_run_with(group, "updates")
        pictures, whose = _snapshots_of_kind(one, "updates"), f"{group.label}, seed {one.run.seed}"
        alike = [
            line for i, way in enumerate(("filter", "channel")) for line in _against_shuffled(pictures, way, 2 * i)
        ]
        if not alike:
            continue
        mean, chance = (round(float(np.mean(line.y)), 2) + 0.0 for line in alike[:2])
        said[one.run.name] = said.get(
            one.run.name, f"{alike[0].name} {mean:.2f} in {group.label}, shuffled {chance:.2f}"
        )
        plots.append(Plot("lines", "round", "correlation", f"{whose}: within one filter or channel", alike))
        kinds.append("")
        head = ["layer", "round", "client", "within a filter", "shuffled", "within a channel", "shuffled"]
        lines = [
            [p["layer"], str(p["round"]), str(p["client"]), *map(_number_or_blank, p["filter"] + p["channel"])]
            for p in pictures
        ]
        tables.append(TextTable(f"{whose}: mean correlation of two sizes |u| in one filter or channel", head, lines))
        names = [picture["layer"] for picture in pictures]
        for picture in sorted(pictures, key=lambda one: names.index(one["layer"])):
            if "values" in picture:
                rows, columns = (_cell_names(picture, axis) for axis in (0, 1))
                where, layer = (
                    f"{whose}: {picture['layer']}, round {picture['round']}",
                    f"{picture['layer']} {picture['shape']}",
                )
                new = layer != kinds[-1]
                plots.append(
                    _heat_plot(picture["values"], rows, columns, "channel", "filter", where)._replace(fresh=new)
                )
                tables.append(_values_table(f"{where}: mean |update|", rows, columns, picture["values"]))
                kinds.append(layer)
    if not plots:
        return None
    return Figure(
        "updates",
        f"Updates by filter and channel: correlation {said.get('fedavg') or next(iter(said.values()))}",
        "Lines above the dotted ones (the same numbers, shuffled) mean that update sizes within one filter or channel "
        "are correlated, which FedSCR relies on. Maps show one client's mean |update| by filter and channel; each "
        "layer has one colour scale for all rounds and methods, from 0.",
        _on_one_scale(plots, kinds),
        tables,
    )


def _against_shuffled(pictures: Sequence[Snapshot], way: str, tint: int) -> list[Series]:
    """The mean over layers by round, and beside it that of the same numbers shuffled."""
    lines = []
    for i, name in enumerate((f"within a {way}", f"shuffled, {way}")):
        found: dict[int, list[float]] = {}
        for picture in pictures:
            if picture[way][i] is not None:
                found.setdefault(picture["round"], []).append(picture[way][i])
        means = [float(np.mean(x)) for x in found.values()]
        if means:
            lines.append(Series(name, means, [float(t) for t in found], tint=tint, hollow=i == 1))
    return lines


def _on_one_scale(plots: list[Plot], kinds: Sequence[str] = ()) -> list[Plot]:
    """Maps of one kind, or all, with the same colours for the same values."""
    words = list(kinds) or [""] * len(plots)
    most: dict[str, float] = {}
    for plot, kind in zip(plots, words, strict=True):
        most[kind] = max([most.get(kind, 0.0), *(abs(x) for row in plot.values for x in row if x is not None)])
    ends = [most[kind] or 1.0 for kind in words]
    return [plot._replace(scale=(-end if plot.signed else 0.0, end)) for plot, end in zip(plots, ends, strict=True)]


def _heat_plot(values: Any, rows: list[str], columns: list[str], x: str, y: str, title: str) -> Plot:
    return Plot("heat", x, y, title, rows=rows, columns=columns, values=values)


def _values_table(title: str, rows: list[str], columns: list[str], values: Sequence[Sequence[Any]]) -> TextTable:
    return TextTable(
        title, ["", *columns], [[row, *map(_number_or_blank, line)] for row, line in zip(rows, values, strict=True)]
    )


def _number_or_blank(x: float | None) -> str:
    return "" if x is None else short_number(x)


def _cell_names(picture: Snapshot, axis: int) -> list[str]:
    """What each cell of a map stands for: one filter, or several neighbours."""
    shown = len(picture["values"]) if axis == 0 else len(picture["values"][0])
    whole = picture["shape"][axis]
    if shown == whole:
        return [str(i) for i in range(whole)]
    return [f"{i * whole // shown}-{-(-(i + 1) * whole // shown) - 1}" for i in range(shown)]
