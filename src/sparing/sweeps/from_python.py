"""A sweep as one call."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sparing.core.errors import ConfigError
from sparing.runs.own_code import trust_code
from sparing.runs.study import place_code, read_yaml
from sparing.runs.tables import frame_of
from sparing.sweeps.execute import run_sweep, train_winner
from sparing.sweeps.folder import Trial, winning_trial
from sparing.sweeps.processes import default_jobs
from sparing.sweeps.spec import sweep_from, trial_study


class SweepResult(NamedTuple):
    """Every trial of a sweep, and the winner's final runs, if there were any."""

    folder: Path
    trials: list[Trial]
    best: Trial | None  # by what the sweep judges by, on validation samples
    final: Trial | None  # its runs on the test samples

    def table(self) -> Any:
        """One row for each trial: its settings, mean and standard deviation over seeds, bytes."""
        rows = []
        for one in self.trials:
            score = one.over_seeds("value")
            sent = {name: one.over_seeds(name).mean for name in ("up_bytes", "down_bytes")}
            why = next(iter(one.failed.values()), "")
            rows.append(
                {"trial": one.number, **one.settings, "score": score.mean, "std": score.std, **sent, "failed": why}
            )
        return frame_of(rows)


def sweep(
    study: str | Path | Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    *,
    out: str | Path,
    jobs: int | None = None,
    final: bool = False,
) -> SweepResult:
    """Try settings of a study, judged on validation samples; called again, it goes on where it was stopped.

    `study` is a study file or its values as a dict, `settings` its section `sweep`, such as
    `{"local.lr": [0.01, 0.1]}`; see docs/sweeps.md. Runs are processes of their own, `jobs` at a time, so a script
    calls this under `if __name__ == "__main__":`. With `final`, the winner is then trained anew and judged on the test
    samples.
    """
    values = read_yaml(Path(study)) if isinstance(study, str | Path) else copy.deepcopy(dict(study))
    if settings is not None:
        values["sweep"] = dict(settings)
    place_code(values, study if isinstance(study, str | Path) else None)
    plan = sweep_from(values, str(study) if isinstance(study, str | Path) else "study")
    if isinstance(study, Mapping):
        trust_code(trial_study(plan, {}, plan.seeds[0]))
    folder, at_once = Path(out), jobs or default_jobs([trial_study(plan, {}, plan.seeds[0])])
    if at_once < 1:
        raise ConfigError(f"jobs is {jobs}; run at least one at a time")
    trials = run_sweep(plan, folder, at_once)
    last = train_winner(plan, folder, trials, at_once) if final else None
    return SweepResult(folder, trials, winning_trial(trials), last)
