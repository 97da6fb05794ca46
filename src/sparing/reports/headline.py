"""One sentence that answers a comparison: who is best, for how many bytes, and how far from the baseline."""

from sparing.reports.comparison import BaselineGap, Comparison, ComparisonRow, megabytes_sent, ranked_measure
from sparing.reports.comparison_tables import short_megabytes
from sparing.reports.ranking import Ranking, short_value, signed_value


def headlines(found: Comparison) -> list[str]:
    """A sentence for each task."""
    return [_task_headline([row for row in found.rows if row.task == task]) for task in found.tasks]


def _task_headline(rows: list[ComparisonRow]) -> str:
    name, base, ranking = ranked_measure(rows), rows[0], rows[0].ranking
    where = f" on {base.task}" if base.task else ""
    if name is None:
        return f"No {ranking.metric} was measured for every method{where}, so none is called the best."
    top = next((row for row in rows if row.best), base)
    sent = f"{short_megabytes(megabytes_sent(top))} MB sent in {base.rounds} round{'s' * (base.rounds > 1)}"
    reached = f"{_mean_text(top.stats[name].mean, name, ranking)} with {sent}"
    superlative = _superlative(ranking)
    if len(rows) == 1:
        what = "" if ranking.by_accuracy else f"{ranking.metric} "
        return f"{top.method} reaches {what}{reached}{where}; there is no other method to compare it with."
    if not top.baseline:
        cost = f"{base.method} sends {short_megabytes(megabytes_sent(base))} MB"
        more = _gap_text(top.gaps.get(name), base.method, ranking)
        return f"{top.method} {superlative}{where}: {reached} ({cost}); {more}."
    others = [row for row in rows if row is not top and name in row.gaps]
    said = f"{top.method}, the baseline, {superlative}{where}: {reached}"
    if not others:
        return f"{said}."
    near = max(others, key=lambda row: ranking.sign * row.gaps[name].mean)
    sends = short_megabytes(megabytes_sent(near))
    return f"{said}; {near.method} comes next with {sends} MB, {_gap_text(near.gaps[name], top.method, ranking)}."


def _mean_text(value: float, name: str, ranking: Ranking) -> str:
    whose = "" if name == ranking.measures[0] else "personalized"
    if ranking.by_accuracy:
        return f"{100 * value:.2f} % {whose} accuracy".replace("  ", " ")
    return f"{short_value(value)} ({whose})" if whose else short_value(value)


def _superlative(ranking: Ranking) -> str:
    if ranking.by_accuracy:
        return "is the most accurate"
    return f"has the {'highest' if ranking.higher_is_better else 'lowest'} {ranking.metric}"


def _gap_text(gap: BaselineGap | None, base: str, ranking: Ranking) -> str:
    """The difference, with its interval, and whether it is more than noise."""
    if gap is None:
        return f"no seed is shared with {base}, so the difference has no paired interval"
    signed = _signed_points if ranking.by_accuracy else lambda value: signed_value(value).replace("-", "−")
    unit = " percentage points" if ranking.by_accuracy else ""
    said = f"{ranking.metric} difference vs {base}: {signed(gap.mean)}{unit}"
    if gap.low != gap.low:
        return f"{said}, from one seed, which cannot tell it from noise"
    clear = gap.low > 0 or gap.high < 0
    interval = f"95 % interval {signed(gap.low)} to {signed(gap.high)}"
    return f"{said} ({interval}, {'more than' if clear else 'within'} noise)"


def _signed_points(share: float) -> str:
    """
    >>> _signed_points(-0.0123), _signed_points(0.5)
    ('−1.23', '+50.00')
    """
    return f"{100 * share:+.2f}".replace("-", "−")
