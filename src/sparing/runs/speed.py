"""How fast a study is on this machine: a few of its own rounds, timed after one to warm up, in a process of their own.

A round's seconds are those of training, of the evaluation, and of all the rest: masks, coding, counting, blending.
"""

import json
import math
import resource
import statistics
import subprocess
import sys
import time
from contextlib import closing
from typing import Any, ClassVar, NamedTuple

import torch

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, SparingError
from sparing.core.method import Lesson, Trained
from sparing.engines.engine import Job
from sparing.runs.loop import cohort_size, wanted_evaluation
from sparing.runs.start import new_run, settle_study, task_from_study
from sparing.runs.study import Study, study_from


class StudySpeed(NamedTuple):
    """Medians over the rounds that were timed."""

    method: str
    rounds: int
    clients: int  # a round
    plan: dict[str, Any]
    device: str
    seconds: float  # a round, without its evaluation
    fastest: float
    slowest: float
    training_seconds: float  # of these
    evaluation_seconds: float
    peak_mb: float  # of the process
    gpu_mb: float  # 0 without one

    @property
    def clients_per_second(self) -> float:
        return self.clients / self.seconds


def measure_speed(study: Study, rounds: int) -> StudySpeed:
    arguments = [sys.executable, "-m", "sparing.runs.speed", str(rounds)]
    done = subprocess.run(arguments, input=study.model_dump_json(), capture_output=True, text=True)
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip().splitlines()[-1])
    if done.returncode:
        raise SparingError(f"the rounds to be timed failed: {done.stderr.strip().splitlines()[-1]}")
    return StudySpeed(**json.loads(done.stdout))


def _time_rounds(study: Study, rounds: int) -> StudySpeed:
    """In that process."""
    job, study = settle_study(
        study.model_copy(update={"rounds": max(study.rounds, rounds + 1)}), task_from_study(study)
    )
    plan = study.plan.model_copy(update={"parcels": "forgotten"})
    watch = _TimedJob(*job)
    watch.trained.clear()
    count = cohort_size(len(job.task) - len(job.task.held_out), study.sample)
    spent: dict[str, list[float]] = {"round": [], "training": [], "evaluation": []}
    with closing(new_run(study.model_copy(update={"plan": plan}), watch, None)) as run:
        for t in range(1, rounds + 2):
            ids = job.fleet.cohort(job.seed, t, len(job.task), count)
            watch.trained.clear()
            began = _synchronized_time()
            run.server, _ = run.engine.round(run.server, ids, t)
            spent["round"].append(_synchronized_time() - began)
            spent["training"].append(_busy_seconds(watch.trained))
            began = _synchronized_time()
            run.engine.evaluate(run.server, t, wanted_evaluation(study.evaluate, job))
            spent["evaluation"].append(_synchronized_time() - began)
    after = {name: values[1:] for name, values in spent.items()}
    return StudySpeed(
        method="+".join(entry if isinstance(entry, str) else next(iter(entry)) for entry in study.method),
        rounds=rounds,
        clients=count,
        plan=study.plan.model_dump(),
        device=study.device,
        seconds=statistics.median(after["round"]),
        fastest=min(after["round"]),
        slowest=max(after["round"]),
        training_seconds=statistics.median(after["training"]),
        evaluation_seconds=statistics.median(after["evaluation"]),
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        gpu_mb=torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else 0.0,
    )


class _TimedJob(Job):
    """The job, with an eye on the clock while clients train."""

    trained: ClassVar[list[tuple[float, float]]] = []  # from when to when, chunk by chunk

    def train(self, lesson: Lesson, ctx: Ctx) -> Trained:
        began = _synchronized_time()
        out = super().train(lesson, ctx)
        self.trained.append((began, _synchronized_time()))
        return out


def _busy_seconds(spans: list[tuple[float, float]]) -> float:
    """Seconds in which at least one of these was under way.

    >>> _busy_seconds([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0)])
    4.0
    """
    total, until = 0.0, -math.inf
    for began, ended in sorted(spans):
        total, until = total + max(0.0, ended - max(began, until)), max(until, ended)
    return total


def _synchronized_time() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    try:
        print(json.dumps(_time_rounds(study_from(json.load(sys.stdin)), int(sys.argv[1]))._asdict()))
    except SparingError as error:
        sys.stderr.write(" ".join(str(error).splitlines()))
        raise SystemExit(2) from None
