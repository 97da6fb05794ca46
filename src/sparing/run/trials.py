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
from sparing.run.compare import Stat, stat
from sparing.run.config import read_yaml
from sparing.run.files import write_atomic, write_json
from sparing.run.folder import CONFIG, FAILED, SUMMARY
from sparing.run.gather import read
from sparing.run.results import last
from sparing.run.sweep import Settings, Sweep, grid, key_of

SWEEP, TRIALS = "sweep.yaml", "trials.json"


class Score(NamedTuple):
    """What one run came to."""

    accuracy: float  # as the sweep judges it
    up_bytes: int
    down_bytes: int

    @property
    def bytes(self) -> int:
        return self.up_bytes + self.down_bytes


class Trial(NamedTuple):
    """Some settings, and the runs that are finished so far."""

    number: int
    settings: Settings
    seeds: list[int]
    scores: dict[int, Score]
    failed: dict[int, str]  # why, where training broke down

    @property
    def complete(self) -> bool:
        """Every seed is there. Only then is there a mean."""
        return all(seed in self.scores for seed in self.seeds)

    def over_seeds(self, name: str) -> Stat:
        """Of a score's number, over all seeds; NaN, and how many there are, where some are missing."""
        values = [float(getattr(self.scores[s], name)) if s in self.scores else math.nan for s in self.seeds]
        return stat(values)


def open_sweep(folder: Path, plan: Sweep) -> None:
    """Make the folder; or see that the sweep in it is this one."""
    asked = {"study": plan.base, "sweep": described(plan)}
    path = folder / SWEEP
    if path.exists():
        before = read_yaml(path)
        for key in asked:
            if before.get(key) != asked[key]:
                raise ConfigError(
                    f"{folder} holds another sweep: its {key} was {before.get(key)}, this one's is {asked[key]}; "
                    "choose another folder with --out"
                )
        return
    if any((folder / name).exists() for name in (TRIALS, CONFIG)):
        raise ConfigError(f"{folder} holds something else than a sweep; choose another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror}); choose another folder with --out") from None
    write_json(folder / TRIALS, [])
    write_atomic(path, yaml.safe_dump(asked, sort_keys=False).encode())


def described(plan: Sweep) -> Any:
    """What must not change: where a search may look. A grid may grow and shrink, and so may trials and seeds."""
    if plan.trials is None:
        return sorted(plan.spaces)
    return {key: one if isinstance(one, list) else {one.kind: list(one[1:])} for key, one in plan.spaces.items()}


def known(folder: Path) -> list[Settings]:
    """The settings of every trial there ever was, by number."""
    try:
        return json.loads((folder / TRIALS).read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{folder / TRIALS} is missing or not as it was written; restore it from a copy") from None


def add(folder: Path, settings: Settings) -> int:
    """Write down what will be tried, before it is; its number."""
    before = known(folder)
    write_json(folder / TRIALS, [*before, settings])
    return len(before)


def planned(folder: Path, plan: Sweep) -> list[Trial]:
    """The trials of a grid, which all have a number then; of a search, those proposed so far."""
    if plan.trials is None:
        have = {key_of(settings) for settings in known(folder)}
        for settings in grid(plan):
            if key_of(settings) not in have:
                add(folder, settings)
    numbers = {key_of(settings): i for i, settings in enumerate(known(folder))}
    wanted = grid(plan) if plan.trials is None else known(folder)
    return [trial(folder, plan, numbers[key_of(settings)], settings) for settings in wanted]


def trial(folder: Path, plan: Sweep, number: int, settings: Settings, seeds: Sequence[int] = ()) -> Trial:
    """A trial as its run folders tell it; or, with seeds of their own, its final runs."""
    seeds = list(seeds or plan.seeds)
    scores, failed = {}, {}
    for seed in seeds:
        path = run_folder(folder, number, seed)
        if (path / FAILED).exists():
            failed[seed] = (path / FAILED).read_text(errors="replace").strip()
        elif all((path / name).exists() for name in (CONFIG, SUMMARY)) and (run := read(path)).finished:
            up, down = (sum(getattr(r, name) for r in run.table) for name in ("up_bytes", "down_bytes"))
            judged = last(run.table, plan.judge)
            if judged != judged:
                raise ConfigError(f"sweep.judge is {plan.judge}, which {path} has not measured; see evaluate.who")
            scores[seed] = Score(judged, up, down)
    return Trial(number, settings, seeds, scores, failed)


def run_folder(folder: Path, number: int, seed: int) -> Path:
    return folder / f"{number:03}-seed{seed}"


def pareto(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other beats in accuracy without sending more, the most accurate first."""
    whole = [trial for trial in trials if trial.complete]
    points = {trial.number: (trial.over_seeds("accuracy").mean, -trial.over_seeds("bytes").mean) for trial in whole}

    def beaten(mine: tuple[float, float]) -> bool:
        return any(all(a >= b for a, b in zip(other, mine, strict=True)) and other != mine for other in points.values())

    front = [trial for trial in whole if not beaten(points[trial.number])]
    return sorted(front, key=lambda trial: points[trial.number], reverse=True)


def winner(trials: Sequence[Trial]) -> Trial | None:
    """The most accurate of all that are complete; of equals, the one that sends least."""
    return next(iter(pareto(trials)), None)
