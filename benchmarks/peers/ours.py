"""This library: a run, round by round, as `sparing.run` does it, in the plan it chooses."""

from contextlib import closing
from typing import Any

import torch
from peers.child import Serve, Spec
from peers.shapes import Shape

from sparing import Task
from sparing.data.clients import Clients
from sparing.runs.loop import RunState, cohort_size
from sparing.runs.start import OWN_TASK, new_run, settle_study_and_plan
from sparing.runs.study import Study, study_from

ROUNDS = 1500  # of a study: for so many the planner finds out what is fastest


def study_of(shape: Shape, method: Any, plan: dict[str, Any], device: str, seed: int) -> tuple[Study, Task]:
    x, y = (part.flatten(0, 1) for part in shape.data(seed))
    count = torch.full((shape.clients,), shape.samples)
    task = Task(shape.model(), Clients(x, y, count.cumsum(0) - count, count), test=(x[:100], y[:100]))
    values = {
        "task": {"data": OWN_TASK, "clients": shape.clients, "split": None, "model": None},
        "method": method,
        "local": {"epochs": shape.epochs, "batch": shape.batch, "lr": shape.lr},
        "rounds": ROUNDS,
        "sample": shape.cohort,
        "device": device,
        "seed": seed,
        "plan": plan,
    }
    return study_from(values), task


def play(run: RunState, n: int) -> None:
    """So many rounds; how one went is read when the next one is under way, as a run on a GPU does it."""
    count, outcomes = cohort_size(run.clients, run.study.sample), []
    for t in range(run.done + 1, run.done + n + 1):
        ids = run.job.fleet.cohort(run.study.seed, t, run.clients, count)
        run.server, outcome = run.engine.start(run.server, ids, t)
        outcomes.append(outcome)
        if len(outcomes) > 1:
            outcomes.pop(0)()
    outcomes.pop()()
    run.done += n


def enter(spec: Spec, serve: Serve) -> None:
    study, task = study_of(spec.shape, spec.method or "fedavg", spec.plan or {}, spec.device, spec.seed)
    job, study, how = settle_study_and_plan(study, task)
    with closing(new_run(study, job, None)) as run:
        serve(
            lambda n: play(run, n),
            lambda: {name: x[0] for name, x in job.network(run.server.model).items()},
            plan=study.plan.model_dump(),
            budget_mb=how.memory_bytes / 1e6,
        )
