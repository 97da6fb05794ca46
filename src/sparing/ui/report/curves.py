"""Figures that compare methods: accuracy, what it cost, whom it reached, how steady it was."""

from collections.abc import Callable, Sequence

import numpy as np

from sparing.run.compare import Gap, gap, jitter
from sparing.run.gather import Group
from sparing.run.ledger import KINDS
from sparing.run.results import last
from sparing.ui.compare import Sheet
from sparing.ui.report.figure import Figure, Plot, Series, short, thinned
from sparing.ui.report.reading import Members, over_seeds, spread

ACCURACIES = {"accuracy": "the global model", "personal_accuracy": "clients' own models, mean over clients"}
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
BAND = "A band is one standard deviation over seeds, each way."
BEYOND = "by more than chance explains (the 95 % interval of the difference, paired by seed)"


def by_round(groups: Sequence[Members]) -> Figure | None:
    plots, tables, said = [], [], ""
    for column, whose in ACCURACIES.items():
        found = lines_of(groups, column, 100)
        if found:
            said = said or leader(groups, column)
            plots.append(Plot("lines", "round", "accuracy (%)", whose, found))
            tables.append(course(f"Accuracy (%) of {whose}", found))
    if not plots:
        return None
    return Figure(
        "accuracy-by-round",
        f"Accuracy by round: {said}",
        f"Higher is better, and further left is sooner. {BAND}"
        + (f" A winner is named only if it leads every other method {BEYOND}." if len(plots[0].series) > 1 else ""),
        plots,
        tables,
    )


def by_bytes(groups: Sequence[Members]) -> Figure | None:
    plots, tables = [], []
    for column, whose in ACCURACIES.items():
        found = [one._replace(x=sent_until(group, one.x)) for group, one in pairs_of(groups, column)]
        if found:
            plots.append(Plot("lines", "MB sent, up and down together (log scale)", "accuracy (%)", whose, found, True))
            rows = [[one.name, f"{x:.4g}", said] for one in found for x, said in zip(one.x, cells(one), strict=True)]
            tables.append(Sheet(f"Accuracy (%) of {whose}", ["method", "MB", "accuracy"], rows))
    if not plots:
        return None
    return Figure(
        "accuracy-by-megabytes",
        "Accuracy for what was sent",
        f"A line further left reaches the same accuracy with fewer bytes; ten times fewer is one decade. {BAND}",
        plots,
        tables,
    )


def by_clock(groups: Sequence[Members]) -> Figure | None:
    timed = [group for group in groups if over_seeds(group, "clock")[0]]
    found = [one._replace(x=clock_at(group, one.x)) for group, one in pairs_of(timed, "accuracy")]
    if not found:
        return None
    rows = [[one.name, f"{x:.4g}", said] for one in found for x, said in zip(one.x, cells(one), strict=True)]
    return Figure(
        "accuracy-by-time",
        "Accuracy by the clients' clock",
        f"Seconds of the simulated devices and links, not of the machine that simulated them. {BAND}",
        [Plot("lines", "seconds of the virtual clock", "accuracy (%)", series=found)],
        [Sheet("Accuracy (%) by time", ["method", "seconds", "accuracy"], rows)],
    )


def pareto(groups: Sequence[Members]) -> Figure | None:
    plots, tables = [], []
    for column, whose in ACCURACIES.items():
        pairs = [(group, end(group, one)) for group, one in pairs_of(groups, column)]
        if len(pairs) < 2:
            continue
        beaten = [[other for other, two in pairs if beats(two, one)] for _, one in pairs]
        clearly = [any(is_clear(against(other, group, column)) for other in others)
                   for (group, _), others in zip(pairs, beaten, strict=True)]  # fmt: skip
        ends = [one._replace(hollow=hollow) for (_, one), hollow in zip(pairs, clearly, strict=True)]
        front = sorted((one.x[0], one.y[0]) for one, others in zip(ends, beaten, strict=True) if not others)
        places = ["beaten" if one.hollow else "seeds cannot tell" if others else "yes"
                  for one, others in zip(ends, beaten, strict=True)]  # fmt: skip
        plots.append(Plot("points", "MB sent (log scale)", "accuracy (%)", whose, ends, True, front=front))
        rows = [[one.name, f"{one.x[0]:.4g}", cells(one)[0], word] for one, word in zip(ends, places, strict=True)]
        tables.append(Sheet(f"The end of the run, {whose}", ["method", "MB", "accuracy (%)", "on the front"], rows))
    if not plots:
        return None
    return Figure(
        "pareto-front",
        "Accuracy against cost",
        "The line joins the methods for which no other costs as little and is as accurate on average. Hollow points "
        f"are beaten: another costs no more and is more accurate {BEYOND}. "
        "Of a full point off the line these seeds cannot tell.",
        plots,
        tables,
    )


def beats(one: Series, other: Series) -> bool:
    no_worse = one.x[0] <= other.x[0] and one.y[0] >= other.y[0]
    return no_worse and (one.x[0] < other.x[0] or one.y[0] > other.y[0])


def end(group: Members, one: Series) -> Series:
    """The last point, by what was sent until then."""
    return one._replace(x=sent_until(group, one.x)[-1:], y=one.y[-1:], spread=one.spread and one.spread[-1:])


def is_clear(more: Gap) -> bool:
    """More accurate beyond chance, or just the same in every seed; of one seed nobody knows."""
    return more.low > 0 or more.low == more.high == 0


def against(one: Members, other: Members, column: str) -> Gap:
    """How much more accurate one ends, paired by seed."""

    def ends(group: Members) -> tuple[Group, list[dict]]:
        runs = [seen.run for seen in group.seen]
        return Group(group.label, runs), [{column: last(run.table, column)} for run in runs]

    return gap(*ends(one), *ends(other), column)


def by_client(groups: Sequence[Members]) -> Figure | None:
    plots, tables = [], []
    held = {group.seen[0].run.settings.get("evaluate.set", "test") for group in groups}
    x = f"accuracy on the client's own {' or '.join(sorted(held))} samples (%)"
    for who, whose in (("before", "the model each client would use"), ("global", "the global model")):
        found = [Series(group.label, pooled(group, who), tint=group.tint) for group in groups]
        found = [one for one in found if one.y]
        if not found:
            continue
        plots.append(Plot("strips", x, title=whose, series=found))
        rows = [[one.name, str(len(one.y)), *(f"{q:.2f}" for q in np.quantile(one.y, QUANTILES))] for one in found]
        head = ["method", "clients", *(f"{100 * q:.0f} %" for q in QUANTILES)]
        tables.append(Sheet(f"Quantiles of accuracy (%), {whose}", head, rows))
    if not plots:
        return None
    return Figure(
        "clients",
        "How accuracy spreads over clients at the end",
        "Each dot is a client (all seeds together); the box holds the middle half, the stroke in it is the median, and "
        "the tick on the left is where the worst tenth ends.",
        plots,
        tables,
    )


def pooled(group: Members, who: str) -> list[float]:
    return [100 * a for one in group.seen for a in one.marks.get(who, [])]


def stability(groups: Sequence[Members]) -> Figure | None:
    plots, tables = [], []
    seeded = [(group, one) for group, one in pairs_of(groups, "accuracy") if one.spread]
    if seeded:
        found = [one._replace(y=one.spread or [], spread=None) for _, one in seeded]
        plots.append(Plot("lines", "round", "points of accuracy", "standard deviation over seeds", found))
        tables.append(course("Standard deviation over seeds", found))
    steps, uneven = [], []
    for group in groups:
        rounds, values = over_seeds(group, "accuracy")
        if len(rounds) > 2:
            steps.append(curve(group, rounds[1:], 100 * np.diff(values, axis=1)))
            uneven.append([group.label, f"{100 * np.mean([jitter(one.run.table, 0) for one in group.seen]):.4f}"])
    if steps:
        bare = [one._replace(spread=None) for one in steps]
        plots.append(Plot("lines", "round", "points of accuracy", "change since the last evaluation", bare))
        tables.append(course("Change since the last evaluation", steps))
        tables.append(Sheet("Standard deviation of these changes, mean over seeds", ["method", "points"], uneven))
    if not plots:
        return None
    return Figure(
        "stability",
        "How steady training is, from seed to seed and from round to round",
        "Lower is steadier on the first plot; on the second, a line that settles near zero has stopped moving.",
        plots,
        tables,
    )


def bytes_sent(groups: Sequence[Members]) -> Figure | None:
    rows, parts = [], []
    for group in groups:
        for way in ("up", "down"):
            rows.append(f"{group.label}, {way}")
            parts.append(np.mean([one.sent[way] for one in group.seen], axis=0) / 1e6)
    whole = np.array(parts)
    if not whole.any():
        return None
    share = 100 * whole / np.maximum(whole.sum(1, keepdims=True), 1e-12)
    kept = [i for i in range(len(KINDS)) if whole[:, i].any()]
    bars = [Series(KINDS[i], whole[:, i].tolist(), tint=i) for i in kept]
    shares = [Series(KINDS[i], share[:, i].tolist(), tint=i) for i in kept]
    cells = [[row, *(f"{x:.4f}" for x in line), f"{line.sum():.4f}"] for row, line in zip(rows, whole, strict=True)]
    up = {group.label: parts[2 * i].sum() for i, group in enumerate(groups)}
    least = [label for label in up if up[label] == min(up.values())]
    alone = f"{least[0]} sends the fewest up" if len(least) == 1 else f"{len(least)} methods send equally few up"
    seen = alone if len(up) > 1 else f"{short(up[least[0]])} MB up"
    return Figure(
        "bytes",
        f"What the bytes are: {seen}",
        "Values are the numbers themselves; index says where they belong, scale how to read them, header and notes are "
        "the rest of each parcel.",
        [Plot("bars", "MB in all rounds, mean over seeds", series=bars, rows=rows, title="how many"),
         Plot("bars", "share of the bytes (%)", series=shares, rows=rows, title="of what kind")],
        [Sheet("MB in all rounds, mean over seeds", ["method and way", *KINDS, "all"], cells)],
    )  # fmt: skip


def lines_of(groups: Sequence[Members], column: str, scale: float = 1.0) -> list[Series]:
    """A line for each group that has this number: mean and standard deviation over seeds."""
    found = [(group, *over_seeds(group, column)) for group in groups]
    return [curve(group, rounds, scale * values) for group, rounds, values in found if rounds]


def pairs_of(groups: Sequence[Members], column: str) -> list[tuple[Members, Series]]:
    have = [group for group in groups if over_seeds(group, column)[0]]
    return list(zip(have, lines_of(have, column, 100), strict=True))


def curve(group: Members, rounds: list[int], values: np.ndarray) -> Series:
    kept = thinned(len(rounds))
    values = values[:, kept]
    x = [float(rounds[i]) for i in kept]
    return Series(group.label, values.mean(axis=0).tolist(), x, spread(values), group.tint)


def at_rounds(column: Callable[[Members], np.ndarray]) -> Callable[[Members, list[float]], list[float]]:
    return lambda group, rounds: [float(column(group)[int(t) - 1]) for t in rounds]


def megabytes(group: Members) -> np.ndarray:
    sent = [[r.up_bytes + r.down_bytes for r in one.run.table] for one in group.seen]
    return np.cumsum(sent, axis=1).mean(axis=0) / 1e6


def seconds(group: Members) -> np.ndarray:
    return np.mean([[r.metrics.get("clock", np.nan) for r in one.run.table] for one in group.seen], axis=0)


sent_until, clock_at = at_rounds(megabytes), at_rounds(seconds)


def cells(one: Series) -> list[str]:
    """Mean ± std, as text."""
    if one.spread is None:
        return [f"{y:.4g}" for y in one.y]
    return [f"{y:.4g} ± {s:.2g}" for y, s in zip(one.y, one.spread, strict=True)]


def course(title: str, found: Sequence[Series]) -> Sheet:
    """A row for each round, a column for each line."""
    said = [dict(zip(one.x, cells(one), strict=True)) for one in found]
    rounds = sorted({x for one in found for x in one.x})
    rows = [[short(x), *(one.get(x, "") for one in said)] for x in rounds]
    return Sheet(title, ["round", *(one.name for one in found)], rows)


def leader(groups: Sequence[Members], column: str) -> str:
    """The winner, if it is one beyond chance; else where those end that may be as good, as far as seeds can tell."""
    ends = sorted(((one.y[-1], group) for group, one in pairs_of(groups, column)), key=lambda end: -end[0])
    high, top = ends[0]
    if len(ends) == 1:
        return f"{top.label} ends at {high:.1f} %"
    lead = [(y, against(top, group, column).low) for y, group in ends[1:]]
    close, unknown = [y for y, low in lead if low <= 0], [y for y, low in lead if low != low]
    if not close + unknown:
        return f"{top.label} ends highest, at {high:.1f} %"
    if not close:
        return f"too few seeds to name a winner, methods end at {ends[-1][0]:.1f} to {high:.1f} %"
    many = f"{len(close) + 1} of {len(ends)} methods"
    return f"no clear winner, {many} are too close to call, at {min(close):.1f} to {high:.1f} %"
