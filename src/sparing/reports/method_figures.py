"""Figures that compare methods: the metric by which their task is ranked, mostly accuracy; what it cost, whom it
reached, how steady it was."""

from collections.abc import Callable, Sequence

import numpy as np

from sparing.reports.comparison import BaselineGap, accuracy_lead, advantage, jitter_of_rounds
from sparing.reports.comparison_tables import TextTable
from sparing.reports.figure import Figure, Plot, Series, short_number, spans_decades, thinned_places
from sparing.reports.ranking import Ranking, short_value
from sparing.reports.report_runs import GroupContents, std_over_seeds, values_over_seeds
from sparing.reports.run_folders import RunGroup
from sparing.runs.files.ledger import ALL_BYTE_KINDS
from sparing.runs.results import latest_value
from sparing.wire.frame import BYTE_KINDS

_WHOSE = ("global model", "personalized models, mean over clients")
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
_BAND_NOTE = "A band is one standard deviation over seeds, each way."
_SENT_AXIS = "MB sent, up and down (log scale)"
_BEYOND_NOISE = "by more than noise (95 % interval of the difference over seeds)"


def result_by_round(groups: Sequence[GroupContents]) -> Figure | None:
    plots, tables, said, ranking = [], [], "", groups[0].ranking
    for column, whose in zip(ranking.columns, _WHOSE, strict=True):
        found = mean_lines(groups, column, ranking.scale)
        if found:
            said = said or _leader_sentence(groups, column)
            plots.append(_lines_plot("round", whose, found, ranking))
            tables.append(rounds_table(f"{_table_title(ranking)}, {whose}", found))
    if not plots:
        return None
    return Figure(
        f"{ranking.metric}-by-round",
        f"{ranking.title} by round: {said}",
        f"{ranking.direction.capitalize()}, and further left is sooner. {_BAND_NOTE}"
        + (
            f" A best method is named only if it leads every other one {_BEYOND_NOISE}."
            if len(plots[0].series) > 1
            else ""
        ),
        plots,
        tables,
    )


def _lines_plot(x: str, whose: str, found: list[Series], ranking: Ranking, log: bool = False) -> Plot:
    """An error that falls by orders of magnitude is drawn on a log scale."""
    log_y = not ranking.higher_is_better and spans_decades(found)
    y = ranking.axis.replace(")", ", log scale)") if log_y else ranking.axis
    return Plot("lines", x, y, whose, found, log, log_y=log_y)


def _table_title(ranking: Ranking) -> str:
    return "Accuracy (%)" if ranking.by_accuracy else ranking.metric


def result_by_bytes(groups: Sequence[GroupContents]) -> Figure | None:
    plots, tables, ranking = [], [], groups[0].ranking
    for column, whose in zip(ranking.columns, _WHOSE, strict=True):
        found = [one._replace(x=_sent_until(group, one.x)) for group, one in _groups_with_lines(groups, column)]
        if found:
            plots.append(_lines_plot(_SENT_AXIS, whose, found, ranking, log=True))
            rows = [
                [one.name, f"{x:.4g}", said]
                for one in found
                for x, said in zip(one.x, _mean_std_texts(one), strict=True)
            ]
            tables.append(TextTable(f"{_table_title(ranking)}, {whose}", ["method", "MB", ranking.metric], rows))
    if not plots:
        return None
    return Figure(
        f"{ranking.metric}-by-megabytes",
        f"{ranking.title} by megabytes sent",
        f"A line further left reaches the same {ranking.metric} with fewer bytes. {_BAND_NOTE}",
        plots,
        tables,
    )


def result_by_clock(groups: Sequence[GroupContents]) -> Figure | None:
    ranking = groups[0].ranking
    timed = [group for group in groups if values_over_seeds(group, "clock")[0]]
    found = [one._replace(x=_clock_at(group, one.x)) for group, one in _groups_with_lines(timed, ranking.metric)]
    if not found:
        return None
    rows = [[one.name, f"{x:.4g}", said] for one in found for x, said in zip(one.x, _mean_std_texts(one), strict=True)]
    return Figure(
        f"{ranking.metric}-by-time",
        f"{ranking.title} by simulated time",
        f"Seconds on the simulated devices and links, not on the machine that simulated them. {_BAND_NOTE}",
        [_lines_plot("simulated seconds", "", found, ranking)],
        [TextTable(f"{_table_title(ranking)} by time", ["method", "seconds", ranking.metric], rows)],
    )


def pareto_figure(groups: Sequence[GroupContents]) -> Figure | None:
    plots, tables, ranking = [], [], groups[0].ranking
    for column, whose in zip(ranking.columns, _WHOSE, strict=True):
        pairs = [(group, _last_point(group, one)) for group, one in _groups_with_lines(groups, column)]
        if len(pairs) < 2:
            continue
        beaten = [[other for other, two in pairs if _dominates(two, one, ranking)] for _, one in pairs]
        clearly = [any(_is_clearly_better(_paired_lead(other, group, column)) for other in others)
                   for (group, _), others in zip(pairs, beaten, strict=True)]  # fmt: skip
        stars = [_has_star(group, one, pairs, column) for group, one in pairs]
        ends = [one._replace(hollow=hollow) for (_, one), hollow in zip(pairs, clearly, strict=True)]
        front = sorted((one.x[0], one.y[0]) for one, others in zip(ends, beaten, strict=True) if not others)
        places = ["beaten" if one.hollow else "within noise" if others else "yes *" if star else "yes, by the mean"
                  for one, others, star in zip(ends, beaten, stars, strict=True)]  # fmt: skip
        plots.append(Plot("points", _SENT_AXIS, ranking.axis, whose, ends, True, front=front))
        rows = [
            [one.name, f"{one.x[0]:.4g}", _mean_std_texts(one)[0], word] for one, word in zip(ends, places, strict=True)
        ]
        tables.append(
            TextTable(f"After the last round, {whose}", ["method", "MB", ranking.column_head, "Pareto front"], rows)
        )
    if not plots:
        return None
    alone = all(len(group.seen) == 1 for group in groups)
    way, better = "Up" if ranking.higher_is_better else "Down", "more accurate" if ranking.by_accuracy else "better"
    return Figure(
        "pareto-front",
        f"{ranking.title} against bytes sent",
        f"{way} and to the left is better; whiskers are one standard deviation over seeds. The dashed line is the "
        f"Pareto front of the means. A hollow point is beaten: another method sends no more and is {better} "
        f"{_BEYOND_NOISE}." + (" With one seed, a lead cannot be told from noise." if alone else ""),
        plots,
        tables,
    )


def _has_star(group: GroupContents, one: Series, pairs: Sequence[tuple[GroupContents, Series]], column: str) -> bool:
    """Whether it is better, by more than noise, than another and than all that send no more."""
    others = [(two.x[0], _paired_lead(group, other, column).low > 0) for other, two in pairs if other is not group]
    return any(beaten for _, beaten in others) and all(beaten for sent, beaten in others if sent <= one.x[0])


def _dominates(one: Series, other: Series, ranking: Ranking = Ranking()) -> bool:
    more = ranking.sign * (one.y[0] - other.y[0])
    return one.x[0] <= other.x[0] and more >= 0 and (one.x[0] < other.x[0] or more > 0)


def _last_point(group: GroupContents, one: Series) -> Series:
    """The last point, by what was sent until then."""
    return one._replace(x=_sent_until(group, one.x)[-1:], y=one.y[-1:], spread=one.spread and one.spread[-1:])


def _is_clearly_better(more: BaselineGap) -> bool:
    """Better beyond chance, or just the same in every seed; of one seed nobody knows."""
    return more.low > 0 or more.low == more.high == 0


def _paired_lead(one: GroupContents, other: GroupContents, column: str) -> BaselineGap:
    """How much better one ends, paired by seed where they share seeds."""

    def ends(group: GroupContents) -> tuple[RunGroup, list[dict]]:
        runs = [seen.run for seen in group.seen]
        return RunGroup(group.label, runs), [{column: latest_value(run.table, column)} for run in runs]

    return advantage(accuracy_lead(*ends(one), *ends(other), column), one.ranking)


def result_by_client(groups: Sequence[GroupContents]) -> Figure | None:
    plots, tables, ranking = [], [], groups[0].ranking
    held = {group.seen[0].run.settings.get("evaluate.set", "test") for group in groups}
    unit = " (%)" if ranking.by_accuracy else f" ({ranking.direction})"
    x = f"{ranking.metric} on the client's own {' or '.join(sorted(held))} samples{unit}"
    tail = "10th" if ranking.higher_is_better else "90th"
    for who, whose in (("before", "personalized model"), ("global", "global model")):
        found = [Series(group.label, _pooled_values(group, who), tint=group.tint) for group in groups]
        found = [one for one in found if one.y]
        if not found:
            continue
        plots.append(Plot("strips", x, title=whose, series=found, low_is_worst=ranking.higher_is_better))
        written = "{:.2f}" if ranking.by_accuracy else "{:.4g}"
        rows = [
            [one.name, str(len(one.y)), *(written.format(q) for q in np.quantile(one.y, _QUANTILES))] for one in found
        ]
        head = ["method", "clients", *(f"{100 * q:.0f} %" for q in _QUANTILES)]
        tables.append(TextTable(f"Quantiles of {ranking.column_head}, {whose}", head, rows))
    if not plots:
        return None
    return Figure(
        "clients",
        f"How {ranking.metric} varies between clients after the last round",
        "Each dot is a client (all seeds together). The box spans the middle half, the thick stroke is the median, and "
        f"the small tick is the {tail} percentile.",
        plots,
        tables,
    )


def _pooled_values(group: GroupContents, who: str) -> list[float]:
    return [group.ranking.scale * a for one in group.seen for a in one.marks.get(who, [])]


def stability_figure(groups: Sequence[GroupContents]) -> Figure | None:
    plots, tables, ranking = [], [], groups[0].ranking
    seeded = [(group, one) for group, one in _groups_with_lines(groups, ranking.metric) if one.spread]
    if seeded:
        found = [one._replace(y=one.spread or [], spread=None) for _, one in seeded]
        plots.append(Plot("lines", "round", ranking.change_axis, "standard deviation over seeds", found))
        tables.append(rounds_table("Standard deviation over seeds", found))
    steps, uneven = [], []
    for group in groups:
        rounds, values = values_over_seeds(group, ranking.metric)
        if len(rounds) > 2:
            steps.append(_mean_line(group, rounds[1:], ranking.scale * np.diff(values, axis=1)))
            jitter = np.mean([jitter_of_rounds(one.run.table, 0, ranking.metric) for one in group.seen])
            uneven.append([group.label, f"{100 * jitter:.4f}" if ranking.by_accuracy else f"{jitter:.4g}"])
    if steps:
        bare = [one._replace(spread=None) for one in steps]
        plots.append(Plot("lines", "round", ranking.change_axis, "change since the last evaluation", bare))
        tables.append(rounds_table("Change since the last evaluation", steps))
        head = ["method", "percentage points" if ranking.by_accuracy else ranking.metric]
        tables.append(TextTable("Standard deviation of these changes, mean over seeds", head, uneven))
    if not plots:
        return None
    return Figure(
        "stability",
        "Stability: between seeds, and from round to round",
        "On the left, lower is more stable; on the right, a line near zero has stopped changing.",
        plots,
        tables,
    )


def bytes_figure(groups: Sequence[GroupContents]) -> Figure | None:
    rows, parts = [], []
    for group in groups:
        for way in ("up", "down"):
            rows.append(f"{group.label}, {way}")
            parts.append(np.mean([one.sent[way] for one in group.seen], axis=0) / 1e6)
    whole = np.array(parts)
    if not whole.any():
        return None
    share = 100 * whole / np.maximum(whole.sum(1, keepdims=True), 1e-12)
    kept = [i for i in range(len(ALL_BYTE_KINDS)) if whole[:, i].any()]
    bars = [Series(ALL_BYTE_KINDS[i], whole[:, i].tolist(), tint=i) for i in kept]
    shares = [Series(ALL_BYTE_KINDS[i], share[:, i].tolist(), tint=i) for i in kept]
    named = [i for i, kind in enumerate(ALL_BYTE_KINDS) if kind in BYTE_KINDS or i in kept]
    cells = [
        [row, *(f"{x:.4f}" for x in line[named]), f"{line.sum():.4f}"] for row, line in zip(rows, whole, strict=True)
    ]
    columns = [ALL_BYTE_KINDS[i] for i in named]
    up = {group.label: parts[2 * i].sum() for i, group in enumerate(groups)}
    least = [label for label in up if up[label] == min(up.values())]
    alone = f"{least[0]} uploads least" if len(least) == 1 else f"{len(least)} methods upload equally little"
    seen = alone if len(up) > 1 else f"{short_number(up[least[0]])} MB up"
    return Figure(
        "bytes",
        f"What the bytes are: {seen}",
        "Value bytes are the numbers themselves, index bytes say where they belong, scale bytes how to decode them; "
        "header and notes are the rest of each message. Keys, shares and unmask are what secure aggregation adds.",
        [Plot("bars", "MB in all rounds, mean over seeds", series=bars, rows=rows, title="total"),
         Plot("bars", "share of the bytes (%)", series=shares, rows=rows, title="by kind")],
        [TextTable("MB in all rounds, mean over seeds", ["method and direction", *columns, "all"], cells)],
    )  # fmt: skip


def mean_lines(groups: Sequence[GroupContents], column: str, scale: float = 1.0) -> list[Series]:
    """A line for each group that has this number: mean and standard deviation over seeds."""
    found = [(group, *values_over_seeds(group, column)) for group in groups]
    return [_mean_line(group, rounds, scale * values) for group, rounds, values in found if rounds]


def _groups_with_lines(groups: Sequence[GroupContents], column: str) -> list[tuple[GroupContents, Series]]:
    have = [group for group in groups if values_over_seeds(group, column)[0]]
    return list(zip(have, mean_lines(have, column, groups[0].ranking.scale if groups else 1), strict=True))


def _mean_line(group: GroupContents, rounds: list[int], values: np.ndarray) -> Series:
    kept = thinned_places(len(rounds))
    values = values[:, kept]
    x = [float(rounds[i]) for i in kept]
    return Series(group.label, values.mean(axis=0).tolist(), x, std_over_seeds(values), group.tint)


def _at_rounds(column: Callable[[GroupContents], np.ndarray]) -> Callable[[GroupContents, list[float]], list[float]]:
    return lambda group, rounds: [float(column(group)[int(t) - 1]) for t in rounds]


def _megabytes_sent(group: GroupContents) -> np.ndarray:
    sent = [[r.up_bytes + r.down_bytes for r in one.run.table] for one in group.seen]
    return np.cumsum(sent, axis=1).mean(axis=0) / 1e6


def _clock_seconds(group: GroupContents) -> np.ndarray:
    return np.mean([[r.metrics.get("clock", np.nan) for r in one.run.table] for one in group.seen], axis=0)


_sent_until, _clock_at = _at_rounds(_megabytes_sent), _at_rounds(_clock_seconds)


def _mean_std_texts(one: Series) -> list[str]:
    """Mean ± std, as text."""
    if one.spread is None:
        return [f"{y:.4g}" for y in one.y]
    return [f"{y:.4g} ± {s:.2g}" for y, s in zip(one.y, one.spread, strict=True)]


def rounds_table(title: str, found: Sequence[Series]) -> TextTable:
    """A row for each round, a column for each line."""
    said = [dict(zip(one.x, _mean_std_texts(one), strict=True)) for one in found]
    rounds = sorted({x for one in found for x in one.x})
    rows = [[short_number(x), *(one.get(x, "") for one in said)] for x in rounds]
    return TextTable(title, ["round", *(one.name for one in found)], rows)


def _leader_sentence(groups: Sequence[GroupContents], column: str) -> str:
    """The best method, if it leads by more than noise; else where those end that may be as good."""
    ranking = groups[0].ranking
    found = [(one.y[-1], group) for group, one in _groups_with_lines(groups, column)]
    ends = sorted(found, key=lambda end: -ranking.sign * end[0])
    best, top = ends[0]

    def said(value: float) -> str:
        return f"{value:.1f}" if ranking.by_accuracy else short_value(value)

    unit = " %" if ranking.by_accuracy else ""
    if len(ends) == 1:
        return f"{top.label} ends at {said(best)}{unit}"
    lead = [(y, _paired_lead(top, group, column).low) for y, group in ends[1:]]
    close, unknown = [y for y, low in lead if low <= 0], [y for y, low in lead if low != low]
    if not close + unknown:
        return f"{top.label} ends {ranking.extreme}, at {said(best)}{unit}"
    if not close:
        low, high = sorted((ends[-1][0], best))
        return f"too few seeds to name a best method, they end at {said(low)} to {said(high)}{unit}"
    many, low, high = f"{len(close) + 1} of {len(ends)} methods", min(*close, best), max(*close, best)
    return f"no clear best, {many} are within noise of the {ranking.extreme}, at {said(low)} to {said(high)}{unit}"
