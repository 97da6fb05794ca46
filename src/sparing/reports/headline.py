"""One sentence that answers a comparison: who is best, for how many bytes, and how far from the baseline."""

from sparing.reports.comparison import BaselineGap, Comparison, ComparisonRow, megabytes_sent, ranked_measure
from sparing.reports.comparison_tables import short_megabytes

_MEASURE_WORDS = {"final_accuracy": "accuracy", "personal_accuracy": "personalized accuracy"}


def headlines(found: Comparison) -> list[str]:
    """A sentence for each task."""
    return [_task_headline([row for row in found.rows if row.task == task]) for task in found.tasks]


def _task_headline(rows: list[ComparisonRow]) -> str:
    name, base = ranked_measure(rows), rows[0]
    where = f" on {base.task}" if base.task else ""
    if name is None:
        return f"No accuracy was measured for every method{where}, so none is called the best."
    top = next((row for row in rows if row.best), base)
    sent = f"{short_megabytes(megabytes_sent(top))} MB sent in {base.rounds} round{'s' * (base.rounds > 1)}"
    reached = f"{100 * top.stats[name].mean:.2f} % {_MEASURE_WORDS[name]} with {sent}"
    if len(rows) == 1:
        return f"{top.method} reaches {reached}{where}; there is no other method to compare it with."
    if not top.baseline:
        cost = f"{base.method} sends {short_megabytes(megabytes_sent(base))} MB"
        more = _gap_text(top.gaps.get(name), base.method)
        return f"{top.method} is the most accurate{where}: {reached} ({cost}); {more}."
    others = [row for row in rows if row is not top and name in row.gaps]
    said = f"{top.method}, the baseline, is the most accurate{where}: {reached}"
    if not others:
        return f"{said}."
    near = max(others, key=lambda row: row.gaps[name].mean)
    sends = short_megabytes(megabytes_sent(near))
    return f"{said}; {near.method} comes next with {sends} MB, {_gap_text(near.gaps[name], top.method)}."


def _gap_text(gap: BaselineGap | None, base: str) -> str:
    """The difference, with its interval, and whether it is more than noise."""
    if gap is None:
        return f"no seed is shared with {base}, so the difference has no paired interval"
    said = f"accuracy difference vs {base}: {_signed_points(gap.mean)} percentage points"
    if gap.low != gap.low:
        return f"{said}, from one seed, which cannot tell it from noise"
    clear = gap.low > 0 or gap.high < 0
    interval = f"95 % interval {_signed_points(gap.low)} to {_signed_points(gap.high)}"
    return f"{said} ({interval}, {'more than' if clear else 'within'} noise)"


def _signed_points(share: float) -> str:
    """
    >>> _signed_points(-0.0123), _signed_points(0.5)
    ('−1.23', '+50.00')
    """
    return f"{100 * share:+.2f}".replace("-", "−")
