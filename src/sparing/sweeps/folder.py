"""The folder of a sweep, and what its trials came to.

    sweep.yaml          what was asked
    trials.json         the settings of every trial, by number
    000-seed0/ ...      a run folder for every trial and seed
    final/003-seed0/    the winner's, judged on the test samples

What the run folders hold is all that a sweep remembers: to go on is to look, and to do what is left.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from sparing.core.errors import ConfigError
from sparing.reports.comparison import SeedStat, mean_difference, seed_stat
from sparing.reports.run_folders import read_run_folder
from sparing.runs.files.run_folder import CONFIG_FILE, FAILED_FILE, SUMMARY_FILE
from sparing.runs.own_code import code_digests
from sparing.runs.results import latest_value
from sparing.runs.study import read_yaml
from sparing.storage.atomic import write_atomic, write_json
from sparing.sweeps.judge import Judge
from sparing.sweeps.spec import SweepSpec, TrialSettings, grid_settings, settings_key, trial_study

SWEEP_FILE, _TRIALS_FILE = "sweep.yaml", "trials.json"


class TrialScore(NamedTuple):
    """What one run came to."""

    value: float  # of what the sweep judges by
    up_bytes: int
    down_bytes: int

    @property
    def bytes(self) -> int:
        return self.up_bytes + self.down_bytes


class Trial(NamedTuple):
    """Some settings, and the runs that are finished so far."""

    number: int
    settings: TrialSettings
    seeds: list[int]
    scores: dict[int, TrialScore]
    failed: dict[int, str]  # why, where training broke down
    judge: Judge = Judge()

    @property
    def complete(self) -> bool:
        """Every seed is there. Only then is there a mean."""
        return all(seed in self.scores for seed in self.seeds)

    def over_seeds(self, name: str) -> SeedStat:
        """Of a score's number, over all seeds; NaN, and how many there are, where some are missing."""
        values = [float(getattr(self.scores[s], name)) if s in self.scores else math.nan for s in self.seeds]
        return seed_stat(values)

    @property
    def merit(self) -> float:
        """The mean over seeds, the larger the better."""
        return self.judge.sign * self.over_seeds("value").mean


def open_sweep_folder(folder: Path, plan: SweepSpec) -> None:
    """Make the folder; or see that the sweep in it is this one."""
    code = code_digests(trial_study(plan, {}, plan.seeds[0]))
    asked = {"study": plan.base, "sweep": _unchangeable_part(plan)} | ({"code": code} if code else {})
    path = folder / SWEEP_FILE
    if path.exists():
        before = read_yaml(path)
        if edited := next((place for place in code if before.get("code", code).get(place) != code[place]), None):
            raise ConfigError(
                f"{folder} holds trials with another {edited}, which was edited since; choose another folder with --out"
            )
        for key in ("study", "sweep"):
            if before.get(key) != asked[key]:
                raise ConfigError(
                    f"{folder} holds another sweep: its {key} was {before.get(key)}, this one's is {asked[key]}; "
                    "choose another folder with --out"
                )
        return
    if any((folder / name).exists() for name in (_TRIALS_FILE, CONFIG_FILE)):
        raise ConfigError(f"{folder} holds something else than a sweep; choose another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror}); choose another folder with --out") from None
    write_json(folder / _TRIALS_FILE, [])
    write_atomic(path, yaml.safe_dump(asked, sort_keys=False).encode())


def _unchangeable_part(plan: SweepSpec) -> Any:
    """What must not change: where a search may look. A grid may grow and shrink, and so may trials and seeds."""
    if plan.trials is None:
        return sorted(plan.spaces)
    return {key: one if isinstance(one, list) else {one.kind: list(one[1:])} for key, one in plan.spaces.items()}


def _known_settings(folder: Path) -> list[TrialSettings]:
    """The settings of every trial there ever was, by number."""
    try:
        return json.loads((folder / _TRIALS_FILE).read_text())
    except (OSError, ValueError):
        raise ConfigError(
            f"{folder / _TRIALS_FILE} is missing or not as it was written; restore it from a copy"
        ) from None


def add_trial(folder: Path, settings: TrialSettings) -> int:
    """Write down what will be tried, before it is; its number."""
    before = _known_settings(folder)
    write_json(folder / _TRIALS_FILE, [*before, settings])
    return len(before)


def planned_trials(folder: Path, plan: SweepSpec) -> list[Trial]:
    """The trials of a grid, which all have a number then; of a search, those proposed so far."""
    if plan.trials is None:
        have = {settings_key(settings) for settings in _known_settings(folder)}
        for settings in grid_settings(plan):
            if settings_key(settings) not in have:
                add_trial(folder, settings)
    numbers = {settings_key(settings): i for i, settings in enumerate(_known_settings(folder))}
    wanted = grid_settings(plan) if plan.trials is None else _known_settings(folder)
    return [read_trial(folder, plan, numbers[settings_key(settings)], settings) for settings in wanted]


def read_trial(folder: Path, plan: SweepSpec, number: int, settings: TrialSettings, seeds: Sequence[int] = ()) -> Trial:
    """A trial as its run folders tell it; or, with seeds of their own, its final runs."""
    seeds = list(seeds or plan.seeds)
    scores, failed, judge = {}, {}, plan.judge
    for seed in seeds:
        path = trial_run_folder(folder, number, seed)
        if (path / FAILED_FILE).exists():
            failed[seed] = (path / FAILED_FILE).read_text(errors="replace").strip()
        elif (
            all((path / name).exists() for name in (CONFIG_FILE, SUMMARY_FILE))
            and (run := read_run_folder(path)).finished
        ):
            up, down = (sum(getattr(r, name) for r in run.table) for name in ("up_bytes", "down_bytes"))
            judge = judge if judge.column else Judge(run.ranking.metric, run.ranking.higher_is_better)
            judged = latest_value(run.table, judge.column)
            if judged != judged:
                raise ConfigError(f"sweep.judge is {judge.column}, which {path} has not measured; see evaluate.who")
            scores[seed] = TrialScore(judged, up, down)
    return Trial(number, settings, seeds, scores, failed, judge)


def trial_run_folder(folder: Path, number: int, seed: int) -> Path:
    return folder / f"{number:03}-seed{seed}"


def pareto_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other beats without sending more, the best first."""
    whole = [trial for trial in trials if trial.complete]
    points = {trial.number: (trial.merit, -trial.over_seeds("bytes").mean) for trial in whole}

    def beaten(mine: tuple[float, float]) -> bool:
        return any(all(a >= b for a, b in zip(other, mine, strict=True)) and other != mine for other in points.values())

    front = [trial for trial in whole if not beaten(points[trial.number])]
    return sorted(front, key=lambda trial: points[trial.number], reverse=True)


def starred_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Those better, by more than noise, than another and than all that send no more; of one seed, none."""
    whole = [trial for trial in trials if trial.complete]

    def leads(one: Trial, other: Trial) -> bool:
        more = [one.judge.sign * (one.scores[s].value - other.scores[s].value) for s in one.seeds]
        return mean_difference(more).low > 0

    def has_star(one: Trial) -> bool:
        sent = one.over_seeds("bytes").mean
        others = [(other.over_seeds("bytes").mean, leads(one, other)) for other in whole if other is not one]
        return any(beaten for _, beaten in others) and all(beaten for size, beaten in others if size <= sent)

    return [trial for trial in pareto_trials(whole) if has_star(trial)]


def winning_trial(trials: Sequence[Trial]) -> Trial | None:
    """The best of all that are complete; of equals, the one that sends least."""
    return next(iter(pareto_trials(trials)), None)
