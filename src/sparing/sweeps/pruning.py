"""Trials that are stopped before their last round, because the others were better by then.

The median rule: a run ends where its best score so far is worse than the median, over the trials that are complete, of
theirs up to the same round. The first quarter of the rounds and the first trials are never stopped.
"""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from sparing.reports.run_folders import read_run_folder
from sparing.runs.results import Record, latest_value
from sparing.sweeps.folder import Trial, trial_run_folder
from sparing.sweeps.judge import Judge
from sparing.sweeps.spec import SweepSpec

_TRIALS_BEFORE = 4
_ROUNDS_BEFORE = 0.25

ScoreBars = dict[int, float]
"""Round -> the score that a run must have reached by then, the larger the better."""


class HopelessTrial(Exception):
    """The run was stopped."""


def score_bars(folder: Path, plan: SweepSpec, trials: Sequence[Trial]) -> ScoreBars:
    """What a new run is held to; nothing where too few trials are complete."""
    whole = [trial for trial in trials if trial.complete]
    if not plan.prune or len(whole) < _TRIALS_BEFORE:
        return {}
    tables = [
        [read_run_folder(trial_run_folder(folder, trial.number, seed)).table for seed in trial.seeds] for trial in whole
    ]
    last = min(len(table) for some in tables for table in some)
    bars = {}
    for t in range(max(1, round(_ROUNDS_BEFORE * last)), last + 1):
        scores = [statistics.fmean(best_score(table[:t], plan.judge) for table in some) for some in tables]
        bars[t] = statistics.median(scores)
    return bars


def best_score(table: Sequence[Record], judge: Judge) -> float:
    """Of the rounds so far, the larger the better; minus infinity where none was measured."""
    found = [judge.sign * latest_value([record], judge.column) for record in table]
    return max((x for x in found if x == x), default=float("-inf"))


def stop_below(bars: ScoreBars, judge: Judge) -> Callable[[Record], None]:
    """A logger of a run that stops it."""
    best = float("-inf")

    def look(record: Record) -> None:
        nonlocal best
        best = max(best, best_score([record], judge))
        bar = bars.get(record.round, float("-inf"))
        measured = latest_value([record], judge.column)
        if measured == measured and best < bar:
            mine, others = (f"{judge.number(judge.sign * score, 1)}{judge.unit}" for score in (best, bar))
            than = "below" if judge.higher_is_better else "above"
            raise HopelessTrial(
                f"stopped after round {record.round}: {judge.column} {mine}, {than} the median of the trials before it "
                f"({others})"
            )

    return look
