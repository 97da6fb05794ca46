"""Figures of what goes on inside a method, from what it reports of each round; only where the runs have it."""

from collections.abc import Callable, Sequence

from sparing.reports.figure import Figure, Plot, Series
from sparing.reports.method_figures import mean_lines, rounds_table
from sparing.reports.report_runs import GroupContents
from sparing.runs.privacy.accountant import privacy_promise

_MOST_LINES = 12  # lines in one plot


def coverage_figure(groups: Sequence[GroupContents]) -> Figure | None:
    """How much of the model somebody voted on; nothing to see where it is always all of it."""
    found = [one for one in mean_lines(groups, "coverage", 100) if min(one.y) < 100]
    if not found:
        return None
    plots = [Plot("lines", "round", "share of the parameters (%)", series=found)]
    tables = [rounds_table("Share of the parameters (%) that at least one client sent", found)]
    if apart := mean_lines(groups, "stale_divergence"):
        plots.append(
            Plot(
                "lines",
                "round",
                "variance between clients",
                "how far the clients' models are apart at the start of a round",
                apart,
            )
        )
        tables.append(rounds_table("Variance between the clients' copies at the start of a round", apart))
    return Figure(
        "coverage",
        "Masks: share of the model that a round updates",
        "Below 100 %, some parameters received no update from any client in that round.",
        plots,
        tables,
    )


def shrinkage_figure(groups: Sequence[GroupContents]) -> Figure | None:
    return _layers_figure(
        groups,
        "c/",
        "shrinkage",
        "Stein shrinkage: how much of each layer's update is kept",
        "At 1 the mean update is applied in full; near 0 it is treated as noise and shrunk.",
        "coefficient",
    )


def pruned_figure(groups: Sequence[GroupContents]) -> Figure | None:
    return _layers_figure(
        groups,
        "pruned_share/",
        "pruned",
        "FedSCR: how much of each layer is not sent",
        "Higher means fewer bytes; what is not sent stays in the client's memory for a later round.",
        "share not sent (%)",
        100,
    )


def approximation_figure(groups: Sequence[GroupContents]) -> Figure | None:
    return _layers_figure(
        groups,
        "approximation/",
        "approximation",
        "Low rank: approximation error of the smallest models, by layer",
        "Relative distance of each layer from its best low-rank approximation; 0 means no loss.",
        "relative error",
    )


def thresholds_figure(groups: Sequence[GroupContents]) -> Figure | None:
    def lines(group: GroupContents) -> list[Series]:
        names = {"threshold_max": "largest", "threshold_mean": "mean", "threshold_min": "smallest"}
        return [one._replace(name=said, tint=i) for i, (name, said) in enumerate(names.items())
                for one in mean_lines([group], name)]  # fmt: skip

    read = (
        "Each client's threshold adapts to how much its update differs from the others'; a lower threshold sends more."
    )
    return _figure_per_group(groups, lines, "thresholds", "FedSCR: thresholds that adapt", read, "threshold")


def epsilon_figure(groups: Sequence[GroupContents]) -> Figure | None:
    found = mean_lines(groups, "epsilon")
    if not found:
        return None
    holds = [said for group in groups if (said := _holds_for(group))]
    return Figure(
        "epsilon",
        "Privacy spent",
        " ".join(["Epsilon only grows over rounds; smaller means stronger privacy.", *holds]).strip(),
        [Plot("lines", "round", "epsilon so far", series=found)],
        [rounds_table("Epsilon", found)],
    )


def _holds_for(group: GroupContents) -> str:
    """For whom the epsilon of these runs holds."""
    run = group.seen[0].run
    if not any("epsilon" in record.metrics for record in run.table):
        return ""
    mode, source = (run.settings.get(f"method.dp.{key}", usual) for key, usual in (("mode", "central"), ("source", "")))
    mode = "summed" if mode == "central" and run.settings.get("secure") else mode
    return f"That of {group.label} {privacy_promise(mode, source != 'seed')}."


def _layers_figure(
    groups: Sequence[GroupContents], prefix: str, key: str, title: str, read: str, y: str, scale: float = 1.0
) -> Figure | None:
    """A plot for each group that reports something by layer, a line for each layer."""

    def lines(group: GroupContents) -> list[Series]:
        names = dict.fromkeys(name for record in group.seen[0].run.table for name in record.metrics)
        layers = [name for name in names if name.startswith(prefix)]
        found = [one._replace(name=layer.removeprefix(prefix)) for layer in _evenly_chosen(layers)
                 for one in mean_lines([group], layer, scale)]  # fmt: skip
        return [one._replace(tint=i) for i, one in enumerate(found)]

    return _figure_per_group(groups, lines, key, title, read, y)


def _figure_per_group(
    groups: Sequence[GroupContents],
    lines: Callable[[GroupContents], list[Series]],
    key: str,
    title: str,
    read: str,
    y: str,
) -> Figure | None:
    found = [(group.label, lines(group)) for group in groups]
    found = [(label, series) for label, series in found if series]
    if not found:
        return None
    plots = [Plot("lines", "round", y, label, series) for label, series in found]
    return Figure(key, title, read, plots, [rounds_table(f"{label}: {y}", series) for label, series in found])


def _evenly_chosen(names: list[str]) -> list[str]:
    """At most so many, evenly spread."""
    if len(names) <= _MOST_LINES:
        return names
    return [names[round(i * (len(names) - 1) / (_MOST_LINES - 1))] for i in range(_MOST_LINES)]
