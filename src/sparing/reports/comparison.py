"""Runs side by side: what each came to over its seeds, what it cost, and how it differs from the baseline.

final         the last value measured                 best          the largest accuracy, the smallest loss
convergence   the first round whose value is within `tolerance` of the run's best: of an accuracy, that much less; of
              another metric, that share of it
compression   the baseline's bytes up a round over the method's: all of them (wire), and of values alone
seed_std      the standard deviation over seeds of a round's value, mean over rounds
jitter        the standard deviation of its change from one evaluation to the next, after `warmup` rounds
gap           the difference to the baseline, paired by seed, with a 95 % confidence interval from Student's t
best          the row of its task with the highest mean, or the lowest where lower is better
star          better, by more than noise, than another row of its task and than all that send no more bytes

Methods are ranked by the first metric of their task, which is accuracy unless it names another one: final_NAME,
best_NAME and personal_NAME are then among the numbers too. Convergence, seed_std, jitter and the target go by it.

Means and standard deviations (n - 1) are over seeds. A number that a seed does not have, its mean does not have.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from sparing.core.errors import ConfigError
from sparing.reports.arrangement import arrange_groups, groups_by_task, ranking_of_task
from sparing.reports.ranking import Ranking
from sparing.reports.run_folders import RunGroup, StoredRun, differing_keys
from sparing.runs.results import (
    Record,
    best_value,
    bytes_to_target,
    highest_accuracy,
    latest_value,
    record_value,
    rounds_to_target,
    seconds_to_target,
)

_CONFIDENCE = 0.95
_TOLERANCE_SLACK = 1e-9  # so that 0.90 is within 0.01 of 0.91
_EVALUATION_SET = "evaluate.set"


class SeedStat(NamedTuple):
    """One number over the seeds."""

    mean: float
    std: float  # NaN for one seed
    seeds: int  # that have it


class BaselineGap(NamedTuple):
    """How much more than the baseline, over the seeds that both have."""

    mean: float
    low: float  # NaN for one seed
    high: float
    seeds: int


class ComparisonRow(NamedTuple):
    """One group."""

    label: str
    seeds: list[int]
    rounds: int
    stats: dict[str, SeedStat]
    ratios: dict[str, float]  # to the baseline
    gaps: dict[str, BaselineGap]
    method: str  # the label without the task
    task: str
    baseline: bool = False
    best: bool = False
    star: bool = False
    ranking: Ranking = Ranking()


class Comparison(NamedTuple):
    rows: list[ComparisonRow]
    baseline: str  # the first task's
    target: float | None
    notes: list[str]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(row.task for row in self.rows))


def compare_groups(
    groups: Sequence[RunGroup],
    baseline: str | None = None,
    target: float | None = None,
    tolerance: float = 0.01,
    warmup: int = 5,
    incomplete: bool = False,
) -> Comparison:
    """The groups of each task against one of them: the named one, else FedAvg, else the first."""
    groups, notes = arrange_groups(groups, baseline, incomplete)
    _refuse_strange_target(groups, target)
    notes += _comparison_caveats(groups) + _unreached_target_notes(groups, target)
    rows: list[ComparisonRow] = []
    for some in groups_by_task(groups).values():
        ranking = ranking_of_task(some)
        numbers = [
            [
                _run_measures(run, ranking, tolerance, warmup) | _target_measures(run, ranking, target)
                for run in group.runs
            ]
            for group in some
        ]
        made = [
            _group_row(group, mine, some[0], numbers[0], ranking) for group, mine in zip(some, numbers, strict=True)
        ]
        made = [row._replace(ratios=_ratios_to_baseline(row, made[0])) for row in made]
        rows += _marked_rows(made, some, numbers)
    return Comparison(rows, groups[0].label, target, notes)


def _refuse_strange_target(groups: Sequence[RunGroup], target: float | None) -> None:
    rankings = [ranking_of_task(some) for some in groups_by_task(groups).values()]
    if target is not None and not 0 <= target <= 1 and all(ranking.by_accuracy for ranking in rankings):
        raise ConfigError(f"--target is {target:g}, but an accuracy lies between 0 and 1; write 0.9 for 90 %")


def _group_row(
    group: RunGroup, mine: list[dict], base: RunGroup, of_base: list[dict], ranking: Ranking
) -> ComparisonRow:
    stats = {name: seed_stat([one[name] for one in mine]) for name in mine[0]}
    between = _seed_std([run.table for run in group.runs], ranking.metric)
    stats["seed_std"] = SeedStat(between, math.nan, len(group.runs) if between == between else 0)
    found = [] if group is base else dict.fromkeys((*ranking.measures, *Ranking().measures))
    gaps = {name: baseline_gap(group, mine, base, of_base, name) for name in found}
    gaps = {name: gap for name, gap in gaps.items() if gap.seeds}
    seeds, rounds = [run.seed for run in group.runs], len(group.runs[0].table)
    method = group.method or group.label
    row = ComparisonRow(group.label, seeds, rounds, stats, {}, gaps, method, group.task, group is base)
    return row._replace(ranking=ranking)


def ranked_measure(rows: Sequence[ComparisonRow]) -> str | None:
    """By which the methods of a task are ranked."""
    names = rows[0].ranking.measures
    return next((name for name in names if all(row.stats[name].mean == row.stats[name].mean for row in rows)), None)


def _marked_rows(rows: list[ComparisonRow], groups: list[RunGroup], numbers: list[list[dict]]) -> list[ComparisonRow]:
    """The same rows, the best marked, and those with a Pareto star."""
    name = ranked_measure(rows)
    if name is None or len(rows) == 1:
        return rows
    ranking = rows[0].ranking
    top = max(ranking.sign * row.stats[name].mean for row in rows)
    leads = {
        (i, j): advantage(accuracy_lead(groups[i], numbers[i], groups[j], numbers[j], name), ranking)
        for i in range(len(rows)) for j in range(len(rows)) if i != j
    }  # fmt: skip

    def star(i: int) -> bool:
        beaten = {j for j in range(len(rows)) if j != i and leads[i, j].low > 0}
        rivals = {j for j in range(len(rows)) if j != i and megabytes_sent(rows[j]) <= megabytes_sent(rows[i])}
        return bool(beaten) and rivals <= beaten

    return [row._replace(best=ranking.sign * row.stats[name].mean == top, star=star(i)) for i, row in enumerate(rows)]


def advantage(more: BaselineGap, ranking: Ranking) -> BaselineGap:
    """How much better that is: where lower is better, how much less."""
    return more if ranking.higher_is_better else BaselineGap(-more.mean, -more.high, -more.low, more.seeds)


def megabytes_sent(row: ComparisonRow) -> float:
    """Up and down together, mean over seeds."""
    return row.stats["up_mb"].mean + row.stats["down_mb"].mean


def _ranked_measures(run: StoredRun, ranking: Ranking) -> dict[str, float]:
    """What one run came to by the metric that methods are ranked by; accuracy is among the others."""
    if ranking.by_accuracy:
        return {}
    final, personal = (latest_value(run.table, column) for column in ranking.columns)
    names = (*ranking.measures, f"best_{ranking.metric}")
    return dict(zip(names, (final, personal, best_of_run(run, ranking)), strict=True))


def best_of_run(run: StoredRun, ranking: Ranking) -> float:
    return best_value(run.table, ranking.metric, ranking.higher_is_better)


def _run_measures(run: StoredRun, ranking: Ranking, tolerance: float, warmup: int) -> dict[str, float]:
    """What one run came to; NaN where there was nothing to measure."""
    table, best = run.table, best_of_run(run, ranking)
    near = (tolerance + _TOLERANCE_SLACK) * (1 if ranking.by_accuracy else abs(best))
    return _ranked_measures(run, ranking) | {
        "final_accuracy": latest_value(table, "accuracy"),
        "best_accuracy": highest_accuracy(table),
        "personal_accuracy": latest_value(table, "personal_accuracy"),
        "worst_decile": latest_value(table, "worst_decile"),
        "final_loss": latest_value(table, "loss"),
        "best_loss": min((r.loss for r in table if r.loss == r.loss), default=math.nan),
        "final_train_loss": latest_value(table, "train_loss"),
        "convergence_round": rounds_to_target(table, ranking.target(best - ranking.sign * near)),
        "jitter": jitter_of_rounds(table, warmup, ranking.metric),
        "up_mb": sum(r.up_bytes for r in table) / 1e6,
        "down_mb": sum(r.down_bytes for r in table) / 1e6,
        "up_values_mb": sum(run.value_bytes) / 1e6,
    }


def _target_measures(run: StoredRun, ranking: Ranking, target: float | None) -> dict[str, float]:
    """What it took to reach the target."""
    if target is None:
        return {}
    table, goal = run.table, ranking.target(target)
    return {
        "rounds_to_target": rounds_to_target(table, goal),
        "mb_to_target": bytes_to_target(table, goal) / 1e6,
        "seconds_to_target": seconds_to_target(table, goal),
    }


def jitter_of_rounds(table: Sequence[Record], warmup: int, column: str) -> float:
    """How uneven the way is: two changes at least."""
    seen = [value for r in table if r.round > warmup and (value := record_value(r, column)) == value]
    return float(np.std(np.diff(seen), ddof=1)) if len(seen) > 2 else math.nan


def _seed_std(tables: Sequence[Sequence[Record]], column: str) -> float:
    """Over the rounds that every seed evaluated."""
    values = np.array([[record_value(r, column) for r in table] for table in tables])
    values = values[:, ~np.isnan(values).any(axis=0)]
    return float(values.std(axis=0, ddof=1).mean()) if len(tables) > 1 and values.size else math.nan


def seed_stat(values: Sequence[float]) -> SeedStat:
    """
    >>> seed_stat([1.0, 2.0, 3.0])
    SeedStat(mean=2.0, std=1.0, seeds=3)
    """
    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return SeedStat(float(np.mean(values)), std, sum(value == value for value in values))


def baseline_gap(group: RunGroup, mine: list[dict], base: RunGroup, theirs: list[dict], name: str) -> BaselineGap:
    """Paired by seed, which gives both the same split, first model and cohorts; nothing where the samples differ."""
    apart = differing_keys([group.runs[0].settings, base.runs[0].settings])
    if any(key.startswith("task.") or key == _EVALUATION_SET for key in apart):
        return mean_difference([])
    return _gap_over_common_seeds(group, mine, base, theirs, name)


def accuracy_lead(one: RunGroup, mine: list[dict], other: RunGroup, theirs: list[dict], name: str) -> BaselineGap:
    """How much more one has than the other: paired by seed, or, where they share fewer than two, as two samples."""
    paired = baseline_gap(one, mine, other, theirs, name)
    if paired.seeds > 1:
        return paired
    a, b = (np.array([run[name] for run in runs]) for runs in (mine, theirs))
    more = float(a.mean() - b.mean())
    if min(len(a), len(b)) < 2:
        return BaselineGap(more, math.nan, math.nan, 1)
    parts = [x.var(ddof=1) / len(x) for x in (a, b)]
    if not sum(parts):
        return BaselineGap(more, more, more, min(len(a), len(b)))
    freedom = sum(parts) ** 2 / sum(part**2 / (len(x) - 1) for part, x in zip(parts, (a, b), strict=True))
    reach = float(stdtrit(freedom, (1 + _CONFIDENCE) / 2) * math.sqrt(sum(parts)))
    return BaselineGap(more, more - reach, more + reach, min(len(a), len(b)))


def _gap_over_common_seeds(
    group: RunGroup, mine: list[dict], base: RunGroup, theirs: list[dict], name: str
) -> BaselineGap:
    have = {run.seed: one[name] for run, one in zip(base.runs, theirs, strict=True)}
    pairs = [(one[name], have[run.seed]) for run, one in zip(group.runs, mine, strict=True) if run.seed in have]
    return mean_difference([a - b for a, b in pairs if a == a and b == b])


def mean_difference(differences: Sequence[float]) -> BaselineGap:
    """Their mean, with a 95 % confidence interval where there are two or more."""
    more = np.array(differences)
    if not len(more):
        return BaselineGap(math.nan, math.nan, math.nan, 0)
    if len(more) == 1:
        return BaselineGap(float(more[0]), math.nan, math.nan, 1)
    reach = float(stdtrit(len(more) - 1, (1 + _CONFIDENCE) / 2) * more.std(ddof=1) / math.sqrt(len(more)))
    return BaselineGap(float(more.mean()), float(more.mean()) - reach, float(more.mean()) + reach, len(more))


def _ratios_to_baseline(row: ComparisonRow, base: ComparisonRow) -> dict[str, float]:
    """Bytes a round: how many times fewer than the baseline's. Unrest: how much more, as a share."""

    def fewer(name: str) -> float:
        mine, theirs = row.stats[name].mean / row.rounds, base.stats[name].mean / base.rounds
        return theirs / mine if mine else (math.inf if theirs else 1.0)

    def more(name: str) -> float:
        mine, theirs = row.stats[name].mean, base.stats[name].mean
        return mine / theirs - 1 if theirs else math.nan

    return {
        "compression": fewer("up_mb"),
        "compression_values": fewer("up_values_mb"),
        "seed_std_change": more("seed_std"),
        "jitter_change": more("jitter"),
    }


def _unreached_target_notes(groups: Sequence[RunGroup], target: float | None) -> list[str]:
    """A target that is out of everybody's reach, by the metric of each task."""
    if target is None:
        return []
    runs: dict[Ranking, list[StoredRun]] = {}
    for some in groups_by_task(groups).values():
        runs.setdefault(ranking_of_task(some), []).extend(run for group in some for run in group.runs)
    notes = []
    for ranking, some in runs.items():
        seen = [best for run in some if (best := best_of_run(run, ranking)) == best]
        if seen and max(ranking.sign * best for best in seen) < ranking.sign * target:
            best = ranking.sign * max(ranking.sign * best for best in seen)
            notes.append(
                f"no run reaches {ranking.target_text(target)}; the {ranking.extreme} is {ranking.shown(best, 2)}"
            )
    return notes


def _comparison_caveats(groups: Sequence[RunGroup]) -> list[str]:
    """What a reader should know before comparing these."""
    notes = []
    seeds = {group.label: [run.seed for run in group.runs] for group in groups}
    if len({tuple(s) for s in seeds.values()}) > 1:
        said = "; ".join(f"{label}: {', '.join(map(str, s))}" for label, s in seeds.items())
        notes.append(f"seeds differ ({said}): means are over different ones, differences over those in common")
    single = [label for label, s in seeds.items() if len(s) == 1]
    if single:
        who = "" if len(single) == len(groups) else f" for {' and '.join(single)}"
        notes.append(f"one seed is one draw: no deviation and no interval{who}; run more, such as seed=1 and seed=2")
    judged = [group.label for group in groups if group.runs[0].settings.get(_EVALUATION_SET) == "validation"]
    if judged:
        who = "" if len(judged) == len(groups) else f" of {' and '.join(judged)}"
        metrics = dict.fromkeys(ranking_of_task(some).metric for some in groups_by_task(groups).values())
        said = " and ".join(dict.fromkeys((*metrics, "loss")))
        notes.append(f"{said}{who} are on validation samples, by which settings are chosen, not on test samples")
    about = [group.runs[0].settings for group in groups]
    other = [key for key in differing_keys(about) if key.split(".")[0] not in ("method", "rounds")]
    other = [key for key in other if key != "task.fingerprint"]
    if other:
        notes.append(f"besides the method, these settings differ: {', '.join(other)}")
    if len(groups_by_task(groups)) > 1:
        notes.append("there are several tasks: methods are ranked, and differences taken, within each task only")
    return notes
