"""A sweep from its first trial to its last, and the winner's final runs."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sparing.core import tree
from sparing.core.compose import compose, remake_model
from sparing.core.errors import ConfigError
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import settle_study, task_from_study
from sparing.runs.study import Study
from sparing.sweeps.folder import (
    SWEEP_FILE,
    Trial,
    add_trial,
    open_sweep_folder,
    planned_trials,
    read_trial,
    trial_run_folder,
    winning_trial,
)
from sparing.sweeps.judge import settled_judge
from sparing.sweeps.optuna_search import import_optuna, propose_settings
from sparing.sweeps.processes import RunAll, SweepRun, run_in_processes
from sparing.sweeps.pruning import score_bars
from sparing.sweeps.spec import SweepSpec, corner_settings, trial_study
from sparing.tasks.task import Task

_FINAL_FOLDER = "final"


class SweepProgress:
    """How far a sweep is, for whoever watches; `tell` is called about four times a second."""

    def __init__(self, plan: SweepSpec, tell: Callable[["SweepProgress"], None]):
        self.plan, self.tell = plan, tell
        self.trials: list[Trial] = []
        self.running: list[SweepRun] = []
        self.count = 0  # of trials in all

    @property
    def done(self) -> int:
        return sum(one.complete or bool(one.failed) for one in self.trials)


def run_sweep(
    plan: SweepSpec,
    folder: Path,
    jobs: int,
    tell: Callable[[SweepProgress], None] = lambda course: None,
    run_all: RunAll | None = None,
) -> list[Trial]:
    """Do what is left of a sweep. Every trial is there afterwards, complete or failed."""
    if plan.trials is not None:
        import_optuna()
    plan = _rehearsed_plan(plan, folder)
    open_sweep_folder(folder, plan)
    course = SweepProgress(plan, tell)
    course.trials = planned_trials(folder, plan)
    course.count = max(plan.trials or 0, len(course.trials))
    seed = trial_study(plan, {}, plan.seeds[0]).seed

    def todo() -> Iterator[SweepRun]:
        """Runs of the trials there are, then of new ones, each proposed when it can begin."""
        number = 0
        while True:
            if number < len(course.trials):
                one = course.trials[number]
                for s in one.seeds:
                    now = course.trials[number]
                    if s not in now.scores and not now.failed:
                        bars = score_bars(folder, plan, course.trials)
                        study = trial_study(plan, one.settings, s)
                        yield SweepRun(trial_run_folder(folder, one.number, s), study, bars, plan.judge)
                number += 1
            elif len(course.trials) < (plan.trials or 0):
                settings = propose_settings(plan, course.trials, seed)
                if settings is None:
                    return
                course.trials.append(read_trial(folder, plan, add_trial(folder, settings), settings))
            else:
                return

    _run_trials(todo(), folder, course, jobs, run_all)
    return course.trials


def _rehearsed_plan(plan: SweepSpec, folder: Path) -> SweepSpec:
    """The plan with its judge settled. The trials of a new sweep are rehearsed: better refused now than hours later."""
    new = not (folder / SWEEP_FILE).exists()
    if not new and plan.judge.by_accuracy:
        return plan
    studies = [trial_study(plan, settings, plan.seeds[0]) for settings in corner_settings(plan)]
    task = task_from_study(studies[0])
    if new:
        _rehearse_trials(studies, task)
    return plan._replace(judge=settled_judge(plan.judge, task.metrics))


def _rehearse_trials(studies: Sequence[Study], task: Task) -> None:
    """Build the first trial, and put every method together on its model."""
    first = studies[0]
    job, _ = settle_study(first, task)
    for study in studies:
        if study.task == first.task:
            static = study.local.buffers == "static"
            made = recipes_from_entries(study.method, study.personalization.options())
            model = remake_model(job.task.build(study.seed), made, static, study.seed)
            compose(tree.layout_of(model, static), *made, local=study.local.local())


def _run_trials(
    todo: Iterator[SweepRun], folder: Path, course: SweepProgress, jobs: int, run_all: RunAll | None
) -> None:
    def finished(work: SweepRun) -> None:
        i = next(i for i, one in enumerate(course.trials) if work.folder in _trial_folders(folder, one))
        one = course.trials[i]
        course.trials[i] = read_trial(folder, course.plan, one.number, one.settings, one.seeds)

    def tick(running: list[SweepRun]) -> None:
        course.running = running
        course.tell(course)

    (run_all or run_in_processes)(lambda: next(todo, None), jobs, finished, tick)


def _trial_folders(folder: Path, one: Trial) -> list[Path]:
    return [trial_run_folder(folder, one.number, seed) for seed in one.seeds]


def train_winner(
    plan: SweepSpec,
    folder: Path,
    trials: list[Trial],
    jobs: int,
    tell: Callable[[SweepProgress], None] = lambda course: None,
    run_all: RunAll | None = None,
) -> Trial:
    """The winner's final runs, on the test samples."""
    best = winning_trial(trials)
    if best is None:
        raise ConfigError(f"no trial in {folder} is complete, so there is no winner; see {folder}/*/failed.txt")
    plan = plan._replace(judge=best.judge)
    inside, course = folder / _FINAL_FOLDER, SweepProgress(plan, tell)
    course.trials, course.count = [read_trial(inside, plan, best.number, best.settings, plan.final)], 1
    left = [s for s in plan.final if s not in course.trials[0].scores and s not in course.trials[0].failed]
    todo = [
        SweepRun(trial_run_folder(inside, best.number, s), trial_study(plan, best.settings, s, final=True))
        for s in left
    ]
    _run_trials(iter(todo), inside, course, jobs, run_all)
    return course.trials[0]
