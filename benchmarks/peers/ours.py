"""This library: a run, round by round, as `sparing.run` does it, in the plan it chooses."""

from contextlib import closing

import torch
from peers.child import Serve, Spec

from sparing import Task
from sparing.run.config import study_from
from sparing.run.loop import cohort_size
from sparing.run.start import OWN_TASK, fresh, planned
from sparing.task.clients import Clients

ROUNDS = 1500  # of a study: for so many the planner finds out what is fastest


def enter(spec: Spec, serve: Serve) -> None:
    shape = spec.shape
    x, y = (part.flatten(0, 1) for part in shape.data(spec.seed))
    count = torch.full((shape.clients,), shape.samples)
    task = Task(shape.model(), Clients(x, y, count.cumsum(0) - count, count), test=(x[:100], y[:100]))
    study = study_from(
        {
            "task": {"data": OWN_TASK, "clients": shape.clients, "split": None, "model": None},
            "method": spec.method or "fedavg",
            "local": {"epochs": shape.epochs, "batch": shape.batch, "lr": shape.lr},
            "rounds": ROUNDS,
            "sample": shape.cohort,
            "device": spec.device,
            "seed": spec.seed,
            "plan": spec.plan or {},
        }
    )
    job, study, how = planned(study, task)
    count = cohort_size(shape.clients, study.sample)
    with closing(fresh(study, job, None)) as run:

        def rounds(n: int) -> None:
            outcomes = []
            for t in range(run.done + 1, run.done + n + 1):
                ids = job.fleet.cohort(study.seed, t, run.clients, count)
                run.server, outcome = run.engine.start(run.server, ids, t)
                outcomes.append(outcome)
                if t > run.done + 1:
                    outcomes.pop(0)()
            outcomes.pop()()
            run.done += n

        serve(
            rounds,
            lambda: {name: x[0] for name, x in job.network(run.server.model).items()},
            plan=study.plan.model_dump(),
            budget_mb=how.memory_bytes / 1e6,
        )
