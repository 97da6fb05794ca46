"""What a study will cost, found out before it runs: bytes counted, time and memory from one short trial.

The trial plays two chunks of the first cohort for a few local steps, and evaluates them, in a process of its own. A run
of many chunks was seen to need up to a fifth more memory than the trial, so a quarter is added.
"""

import json
import math
import resource
import subprocess
import sys
import time
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.core.errors import ConfigError, SparingError
from sparing.core.method import Local
from sparing.core.round import Server, first_client, outgoing
from sparing.core.wire import nbytes
from sparing.engines.engine import Job, Sizes, context
from sparing.engines.evaluation import Wanted
from sparing.run.clock import clocked, is_timed
from sparing.run.config import Study, study_from
from sparing.run.loop import cohort_size
from sparing.run.plan import bytes_of
from sparing.run.start import fresh, named_task, planned
from sparing.task.clock import visits
from sparing.task.fleet import Fleet
from sparing.train.working_copy import EVALUATED_AT_ONCE

STEPS = 3
MARGIN = 1.25


class Cost(NamedTuple):
    """Per round unless it says otherwise; bytes up are those of a trial update where the data decides them."""

    clients: int
    samples: int
    parameters: int
    cohort: int
    plan: dict[str, Any]
    how: str  # the plan came about: "given", "rule", "measured" or "remembered"
    why: str  # the rule had to do
    speeds: list[tuple[str, int, int, float]]  # path, chunk, threads, clients a second: what was tried
    flight_bytes: int  # clients' models and updates in memory at once
    memory_bytes: int  # what these may take
    down_bytes: int
    up_bytes: int
    first_bytes: int  # down, in the first round, when every client is new
    seconds: float
    evaluation_seconds: float  # of one evaluation
    peak_mb: float  # of the whole run
    state_mb: float  # all clients' state, once every one has taken part
    clock: float | None  # seconds of the first round on the clients' own links; None: they declare none


def check(study: Study) -> Cost:
    """Validate, and measure in a process of its own."""
    arguments = [sys.executable, "-m", "sparing.run.check"]
    done = subprocess.run(arguments, input=study.model_dump_json(), capture_output=True, text=True)
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        raise SparingError(f"the trial failed: {done.stderr.strip().splitlines()[-1]}")
    return Cost(**json.loads(done.stdout))


def trial(study: Study) -> Cost:
    """Two chunks of clients through a real round, a few steps each, and a look at their models."""
    job, study, found = planned(study, named_task(study))
    count = cohort_size(len(job.task) - len(job.task.held_out), study.sample)
    everyone = job.fleet.cohort(job.seed, 1, len(job.task), count)
    ids = everyone[torch.argsort(job.task.train.count[everyone], descending=True)][: 2 * job.chunk]
    plan = study.plan.model_copy(update={"parcels": "forgotten"})
    with closing(fresh(study.model_copy(update={"plan": plan}), shortened(job), None)) as run:
        began = time.perf_counter()
        server, outcome = run.engine.round(run.server, ids, 1)
        spent = time.perf_counter() - began
        began = time.perf_counter()
        run.engine.evaluate(server, 1, Wanted(ids))
        looked = time.perf_counter() - began
    scale = count / len(ids)
    return Cost(
        clients=len(job.task),
        samples=int(job.task.train.count.sum()),
        parameters=job.method.layout.size,
        cohort=count,
        plan=study.plan.model_dump(),
        how=found.how,
        why=found.why,
        speeds=[(way.path, way.chunk, way.threads, speed) for way, speed in found.speeds.items()],
        flight_bytes=min(job.chunk, count) * found.client_bytes,
        memory_bytes=found.memory_bytes,
        down_bytes=sent_down(job, server, everyone),
        up_bytes=round(total(outcome.up) * scale),
        first_bytes=round(total(outcome.down) * scale),
        seconds=spent * steps_of(job, everyone) / steps_of(shortened(job), ids),
        evaluation_seconds=looked * looks(job, study.evaluate.clients) / looks(shortened(job), len(ids)),
        peak_mb=MARGIN * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        state_mb=bytes_of(first_client(job.method, job.initial)) * len(job.task) / 1e6,
        clock=clocked(shortened(job), outcome, 1, 0.0)["clock"] if is_timed(job.fleet) else None,
    )


def sent_down(job: Job, server: Server, ids: Tensor) -> int:
    """Bytes to these clients once they are known; clients of one size get as much as each other.

    Where the server broadcasts, a client misses as many updates like the first as there are cohorts in the task.
    """
    updates = float(server.past["size/1"].sum()) * len(job.task) / len(ids) if "size/1" in server.past else math.inf
    cohort = context(job, server, ids, 2)
    members = cohort.members._replace(first=torch.zeros_like(cohort.ids, dtype=torch.bool))
    cohort = cohort._replace(members=members)
    size = job.method.fit.sizes(cohort) if job.method.fit else torch.zeros_like(cohort.ids)
    alike = [(size == one).nonzero()[:, 0] for one in size.unique()]
    whole = [int(nbytes(outgoing(job.method, server, cohort.at(k[:1])))[0]) for k in alike]
    return sum(round(min(one, updates)) * len(k) for one, k in zip(whole, alike, strict=True))


def shortened(job: Job) -> Job:
    """The same job, a few local steps long, tested on few samples."""
    local = job.method.local
    short = local.each_phase(lambda phase: phase._replace(steps=min(STEPS, phase.steps or STEPS)))
    method = job.method._replace(local=short)
    return job._replace(method=method, task=job.task.tested_on(2 * EVALUATED_AT_ONCE), fleet=slowed(job, method.local))


def slowed(job: Job, local: Local) -> Fleet:
    """Devices that take as long for this training as they did for the job's, so that deadlines mean the same."""
    fleet, n = job.fleet, job.task.train.count
    if "speed" not in fleet.capacity:
        return fleet
    speed = fleet.capacity["speed"] * visits(local, n) / visits(job.method.local, n)
    return fleet._replace(capacity={**fleet.capacity, "speed": speed})


def steps_of(job: Job, ids: Tensor) -> int:
    """Local steps these clients take in a round."""
    steps = 0
    for phase in job.method.local.phases + job.method.local.wrapped_phases:
        batches = -(-job.task.train.count[ids] // phase.batch)
        steps += phase.steps * len(ids) if phase.steps else int(batches.sum()) * phase.epochs
    return steps


def looks(job: Job, clients: int) -> int:
    """Samples that pass through a model in one evaluation of so many clients."""
    task, own = job.task, 0
    if task.test is not None:
        own = int(task.test.count.double().mean() * min(clients, len(task)) * 2)
    return max(1, own + (len(task.test_all[1]) if task.test_all is not None else 0))


def total(sizes: Sizes) -> int:
    return sum(int(x.sum()) for x in sizes.values())


if __name__ == "__main__":
    try:
        print(json.dumps(trial(study_from(json.load(sys.stdin)))._asdict()))
    except SparingError as error:
        sys.stderr.write(str(error))
        raise SystemExit(2) from None
