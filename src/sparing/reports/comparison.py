"""Runs side by side: what each came to over its seeds, what it cost, and how it differs from the baseline.

final         the last value measured                 best          the largest accuracy, the smallest loss
convergence   the first round whose accuracy is within `tolerance` of the run's best
compression   the baseline's bytes up a round over the method's: all of them (wire), and of values alone
seed_std      the standard deviation over seeds of a round's accuracy, mean over rounds
jitter        the standard deviation of the change in accuracy from one evaluation to the next, after `warmup` rounds
gap           the difference to the baseline, paired by seed, with a 95 % confidence interval from Student's t

Means and standard deviations (n - 1) are over seeds. A number that a seed does not have, its mean does not have.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from sparing.core.errors import ConfigError, nearest_name
from sparing.reports.run_folders import RunGroup, StoredRun, differing_keys
from sparing.runs.results import (
    Record,
    bytes_to_accuracy,
    highest_accuracy,
    latest_value,
    rounds_to_accuracy,
    seconds_to_accuracy,
)

_CONFIDENCE = 0.95
_TOLERANCE_SLACK = 1e-9  # so that 0.90 is within 0.01 of 0.91
_PAIRED_MEASURES = ("final_accuracy", "personal_accuracy")
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


class Comparison(NamedTuple):
    rows: list[ComparisonRow]
    baseline: str
    target: float | None
    notes: list[str]


def compare_groups(
    groups: Sequence[RunGroup],
    baseline: str | None = None,
    target: float | None = None,
    tolerance: float = 0.01,
    warmup: int = 5,
    incomplete: bool = False,
) -> Comparison:
    """All groups against one of them: the named one, else FedAvg, else the first."""
    groups, notes = complete_groups(groups, incomplete)
    base, said = _choose_baseline(groups, baseline)
    notes += said + _comparison_caveats(groups) + _unreached_target_notes(groups, target)
    numbers = [[_run_measures(run, target, tolerance, warmup) for run in group.runs] for group in groups]
    of_base = numbers[groups.index(base)]
    rows = []
    for group, mine in zip(groups, numbers, strict=True):
        stats = {name: seed_stat([one[name] for one in mine]) for name in mine[0]}
        between = _seed_std([run.table for run in group.runs])
        stats["seed_std"] = SeedStat(between, math.nan, len(group.runs) if between == between else 0)
        gaps = (
            {} if group is base else {name: baseline_gap(group, mine, base, of_base, name) for name in _PAIRED_MEASURES}
        )
        seeds, rounds = [run.seed for run in group.runs], len(group.runs[0].table)
        rows.append(ComparisonRow(group.label, seeds, rounds, stats, {}, {k: v for k, v in gaps.items() if v.seeds}))
    first = rows[groups.index(base)]
    return Comparison([row._replace(ratios=_ratios_to_baseline(row, first)) for row in rows], base.label, target, notes)


def _run_measures(run: StoredRun, target: float | None, tolerance: float, warmup: int) -> dict[str, float]:
    """What one run came to; NaN where there was nothing to measure."""
    table = run.table
    out = {
        "final_accuracy": latest_value(table, "accuracy"),
        "best_accuracy": highest_accuracy(table),
        "personal_accuracy": latest_value(table, "personal_accuracy"),
        "worst_decile": latest_value(table, "worst_decile"),
        "final_loss": latest_value(table, "loss"),
        "best_loss": min((r.loss for r in table if r.loss == r.loss), default=math.nan),
        "final_train_loss": latest_value(table, "train_loss"),
        "convergence_round": rounds_to_accuracy(table, highest_accuracy(table) - tolerance - _TOLERANCE_SLACK),
        "jitter": accuracy_jitter(table, warmup),
        "up_mb": sum(r.up_bytes for r in table) / 1e6,
        "down_mb": sum(r.down_bytes for r in table) / 1e6,
        "up_values_mb": sum(run.value_bytes) / 1e6,
    }
    if target is not None:
        out["rounds_to_target"] = rounds_to_accuracy(table, target)
        out["mb_to_target"] = bytes_to_accuracy(table, target) / 1e6
        out["seconds_to_target"] = seconds_to_accuracy(table, target)
    return out


def accuracy_jitter(table: Sequence[Record], warmup: int) -> float:
    """How uneven the way is: two changes at least."""
    seen = [r.accuracy for r in table if r.round > warmup and r.accuracy == r.accuracy]
    return float(np.std(np.diff(seen), ddof=1)) if len(seen) > 2 else math.nan


def _seed_std(tables: Sequence[Sequence[Record]]) -> float:
    """Over the rounds that every seed evaluated."""
    values = np.array([[r.accuracy for r in table] for table in tables])
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
    nothing = BaselineGap(math.nan, math.nan, math.nan, 0)
    apart = differing_keys([group.runs[0].settings, base.runs[0].settings])
    if any(key.startswith("task.") or key == _EVALUATION_SET for key in apart):
        return nothing
    have = {run.seed: one[name] for run, one in zip(base.runs, theirs, strict=True)}
    pairs = [(one[name], have[run.seed]) for run, one in zip(group.runs, mine, strict=True) if run.seed in have]
    more = np.array([a - b for a, b in pairs if a == a and b == b])
    if not len(more):
        return nothing
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


def complete_groups(groups: Sequence[RunGroup], incomplete: bool) -> tuple[list[RunGroup], list[str]]:
    """Groups whose runs have equally many rounds. Others are refused; or, where asked, cut to what all runs have."""
    out, notes = [], []
    for group in groups:
        unfinished = [run for run in group.runs if not run.finished]
        rounds = [len(run.table) for run in group.runs]
        if not unfinished and len(set(rounds)) == 1:
            out.append(group)
            continue
        what = ", ".join(f"{run.folder} ({len(run.table)} rounds)" for run in unfinished or group.runs)
        why = "is not finished" if unfinished else "has runs of different length"
        if not incomplete:
            fix = "`sparing resume` goes on with a run" if unfinished else "leave some of them out"
            raise ConfigError(f"{group.label} {why}: {what}; {fix}, or compare what there is with --allow-incomplete")
        runs = [run for run in group.runs if run.table]
        if not runs:
            notes.append(f"{group.label} {why}: {what}; it is left out")
            continue
        least = min(len(run.table) for run in runs)
        cut = [run._replace(table=run.table[:least], value_bytes=run.value_bytes[:least]) for run in runs]
        out.append(group._replace(runs=cut))
        notes.append(f"{group.label} {why}: {what}; figures are after round {least}, over {len(runs)} seeds")
    if not out:
        raise ConfigError("none of these runs has a round to compare; let one finish")
    return out, notes


def _choose_baseline(groups: Sequence[RunGroup], wanted: str | None) -> tuple[RunGroup, list[str]]:
    if wanted is not None:
        hits = [group for group in groups if wanted in (group.label, group.runs[0].name)]
        if len(hits) != 1:
            labels = [group.label for group in groups]
            found = f"names {len(hits)} of these" if hits else "is none of these"
            raise ConfigError(f"--baseline {wanted!r} {found}; {nearest_name(wanted, labels)}")
        return hits[0], []
    plain = [group for group in groups if group.runs[0].name == "fedavg"]
    if not plain:
        return groups[0], [f"no run of fedavg alone is here, so compression and differences are to {groups[0].label}"]
    return plain[0], [f"there are {len(plain)} of fedavg: differences are to {plain[0].label}"] if len(
        plain
    ) > 1 else []


def _unreached_target_notes(groups: Sequence[RunGroup], target: float | None) -> list[str]:
    """A target that is out of everybody's reach."""
    highest = max(
        (top for group in groups for run in group.runs if (top := highest_accuracy(run.table)) == top), default=None
    )
    if target is None or highest is None or highest >= target:
        return []
    return [f"no run reaches {100 * target:g} % accuracy; the highest is {100 * highest:.2f} %"]


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
        notes.append(
            f"accuracy and loss{who} are on validation samples, by which settings are chosen, not on test samples"
        )
    rounds = {group.label: len(group.runs[0].table) for group in groups}
    if len(set(rounds.values())) > 1:
        said = "; ".join(f"{label}: {count}" for label, count in rounds.items())
        notes.append(f"rounds differ ({said}): final figures and megabytes are not of the same round")
    about = [group.runs[0].settings for group in groups]
    other = [key for key in differing_keys(about) if key.split(".")[0] not in ("method", "rounds")]
    if other:
        notes.append(f"beside the method, these settings differ: {', '.join(other)}")
    return notes
