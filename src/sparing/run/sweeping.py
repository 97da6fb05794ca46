"""A sweep from its first trial to its last, and the winner's final runs."""

from collections.abc import Callable, Iterator
from pathlib import Path

from sparing.core import tree
from sparing.core.compose import compose, remade
from sparing.core.errors import ConfigError
from sparing.run.methods import recipes
from sparing.run.search import optuna_module, propose
from sparing.run.start import named_task, settled
from sparing.run.sweep import Sweep, corners, study_for
from sparing.run.trials import SWEEP, Trial, add, open_sweep, planned, run_folder, trial, winner
from sparing.run.workers import Work, work_off

FINAL = "final"


class Course:
    """How far a sweep is, for whoever watches; `tell` is called about four times a second."""

    def __init__(self, plan: Sweep, tell: Callable[["Course"], None]):
        self.plan, self.tell = plan, tell
        self.trials: list[Trial] = []
        self.running: list[Work] = []
        self.count = 0  # of trials in all

    @property
    def done(self) -> int:
        return sum(one.complete or bool(one.failed) for one in self.trials)


def sweep(plan: Sweep, folder: Path, jobs: int, tell: Callable[[Course], None] = lambda course: None) -> list[Trial]:
    """Do what is left of a sweep. Every trial is there afterwards, complete or failed."""
    if plan.trials is not None:
        optuna_module()
    if not (folder / SWEEP).exists():
        rehearse(plan)
    open_sweep(folder, plan)
    course = Course(plan, tell)
    course.trials = planned(folder, plan)
    course.count = max(plan.trials or 0, len(course.trials))
    seed = study_for(plan, {}, plan.seeds[0]).seed

    def todo() -> Iterator[Work]:
        """Runs of the trials there are, then of new ones, each proposed when it can begin."""
        number = 0
        while True:
            if number < len(course.trials):
                one = course.trials[number]
                for s in one.seeds:
                    now = course.trials[number]
                    if s not in now.scores and not now.failed:
                        yield Work(run_folder(folder, one.number, s), study_for(plan, one.settings, s))
                number += 1
            elif len(course.trials) < (plan.trials or 0):
                settings = propose(plan, course.trials, seed)
                if settings is None:
                    return
                course.trials.append(trial(folder, plan, add(folder, settings), settings))
            else:
                return

    work_through(todo(), folder, course, jobs)
    return course.trials


def rehearse(plan: Sweep) -> None:
    """Build the first trial, and put every method together on its model: better refused now than hours later."""
    studies = [study_for(plan, settings, plan.seeds[0]) for settings in corners(plan)]
    first = studies[0]
    job, _ = settled(first, named_task(first))
    for study in studies:
        if study.task == first.task:
            static = study.local.buffers == "static"
            made = recipes(study.method, study.personalization.options())
            model = remade(job.task.build(study.seed), made, static, study.seed)
            compose(tree.layout_of(model, static), *made, local=study.local.local())


def work_through(todo: Iterator[Work], folder: Path, course: Course, jobs: int) -> None:
    def finished(work: Work) -> None:
        i = next(i for i, one in enumerate(course.trials) if work.folder in folders(folder, one))
        one = course.trials[i]
        course.trials[i] = trial(folder, course.plan, one.number, one.settings, one.seeds)

    def tick(running: list[Work]) -> None:
        course.running = running
        course.tell(course)

    work_off(lambda: next(todo, None), jobs, finished, tick)


def folders(folder: Path, one: Trial) -> list[Path]:
    return [run_folder(folder, one.number, seed) for seed in one.seeds]


def train_winner(
    plan: Sweep, folder: Path, trials: list[Trial], jobs: int, tell: Callable[[Course], None] = lambda course: None
) -> Trial:
    """The winner's final runs, on the test samples."""
    best = winner(trials)
    if best is None:
        raise ConfigError(f"no trial in {folder} is complete, so there is no winner; see {folder}/*/failed.txt")
    inside, course = folder / FINAL, Course(plan, tell)
    course.trials, course.count = [trial(inside, plan, best.number, best.settings, plan.final)], 1
    left = [s for s in plan.final if s not in course.trials[0].scores and s not in course.trials[0].failed]
    todo = [Work(run_folder(inside, best.number, s), study_for(plan, best.settings, s, final=True)) for s in left]
    work_through(iter(todo), inside, course, jobs)
    return course.trials[0]
