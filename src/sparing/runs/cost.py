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
from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparing.core.errors import ConfigError, SparingError
from sparing.core.method import Local, Method, Trait
from sparing.core.round import Server, first_client, outgoing
from sparing.engines.engine import Job, Sizes, cohort_context
from sparing.engines.evaluation import Wanted
from sparing.fleet.fleet import Fleet
from sparing.fleet.timing import samples_visited
from sparing.runs.loop import cohort_size
from sparing.runs.plan.settle import tree_bytes
from sparing.runs.round_times import clock_report, is_timed
from sparing.runs.secure_price import SecurePrice, secure_price
from sparing.runs.start import new_run, settle_study_and_plan, study_of_arguments, task_from_study
from sparing.runs.study import PersonalizationSection, Study, study_from
from sparing.tasks.task import Task
from sparing.train.working_copy import EVALUATED_AT_ONCE
from sparing.wire import nbytes

_COST_STEPS = 3
_MEMORY_MARGIN = 1.25


class StudyCost(NamedTuple):
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
    fedavg_seconds: float | None  # a round of FedAvg, where the method searches for what fits a budget; else None
    clock: float | None  # seconds of the first round on the clients' own links; None: they declare none
    open_down_bytes: int  # without secure aggregation
    open_up_bytes: int
    secure: SecurePrice | None  # what secure aggregation costs a client of the first round; None: there is none


def check(
    task: Task | dict[str, Any] | str | None = None, method: str | Sequence[Any] = "fedavg", **study: Any
) -> StudyCost:
    """Validate a study, and measure what a run would cost: memory, bytes and time. It takes what `sparing.run` takes.

    A `Task` of your own is measured in this process, whose memory then counts.
    """
    own = study_of_arguments(task, method, study)
    return run_cost_trial(own, task) if isinstance(task, Task) else check_study(own)


def check_study(study: Study) -> StudyCost:
    """Validate, and measure in a process of its own."""
    arguments = [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m", "sparing.runs.cost"]
    done = subprocess.run(arguments, input=study.model_dump_json(), capture_output=True, text=True)
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        raise SparingError(f"the trial failed: {done.stderr.strip().splitlines()[-1]}")
    found = json.loads(done.stdout)
    return StudyCost(**found | {"secure": SecurePrice(**found["secure"]) if found["secure"] else None})


def cost_values(cost: StudyCost) -> dict[str, Any]:
    """For JSON."""
    return cost._asdict() | {"secure": cost.secure and cost.secure._asdict()}


def _searches(method: Method) -> bool:
    """Whether a codec tries what fits into a number of bytes, which takes time."""
    return any(Trait.COUNTS in codec.effect.traits for codec in method.up)


def _fedavg_seconds(study: Study, task: Task | None) -> float:
    plain = {"method": ["fedavg"], "personalization": PersonalizationSection()}
    return run_cost_trial(study.model_copy(update=plain), task).seconds


def run_cost_trial(study: Study, task: Task | None = None) -> StudyCost:
    """Two chunks of clients through a real round, a few steps each, and a look at their models."""
    job, study, found = settle_study_and_plan(study, task or task_from_study(study))
    count = cohort_size(len(job.task) - len(job.task.held_out), study.sample)
    everyone = job.fleet.cohort(job.seed, 1, len(job.task), count)
    ids = everyone[torch.argsort(job.task.train.count[everyone], descending=True)][: 2 * job.chunk]
    plan = study.plan.model_copy(update={"parcels": "forgotten"})
    with closing(new_run(study.model_copy(update={"plan": plan}), _shorten_job(job), None)) as run:
        price = _price_of_secure(job, run.server, everyone, count)
        began = time.perf_counter()
        server, outcome = run.engine.round(run.server, ids, 1)
        spent = time.perf_counter() - began
        began = time.perf_counter()
        run.engine.evaluate(server, 1, Wanted(ids))
        looked = time.perf_counter() - began
    scale = count / len(ids)
    steps = _steps_in_round(job, everyone) / _steps_in_round(_shorten_job(job), ids)
    plain = _fedavg_seconds(study, task) if _searches(job.method) else None
    seconds = spent * steps if plain is None else plain + max(0.0, spent - plain / steps) * scale
    down, up = _download_bytes(job, server, everyone), round(_total_bytes(outcome.up) * scale)
    more, masked = price.down * count if price else 0, up
    if price:  # who drops out has prepared; of both ways, the bytes to be expected
        stays = 1 - job.fleet.dropout
        masked = round(count * (stays * price.up + job.fleet.dropout * (price.up_keys + price.up_shares)))
        up = round(_total_bytes(outcome.up) / max(1, int(outcome.arrived.sum())) * count * stays)
    return StudyCost(
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
        down_bytes=down + more,
        up_bytes=masked,
        first_bytes=round(_total_bytes(outcome.down) * scale) + more,
        seconds=seconds,
        evaluation_seconds=looked
        * _samples_evaluated(job, study.evaluate.clients)
        / _samples_evaluated(_shorten_job(job), len(ids)),
        peak_mb=_MEMORY_MARGIN * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        state_mb=tree_bytes(first_client(job.method, job.initial)) * len(job.task) / 1e6,
        fedavg_seconds=plain,
        clock=clock_report(_shorten_job(job), outcome, 1, 0.0)["clock"] if is_timed(job.fleet) else None,
        open_down_bytes=down,
        open_up_bytes=up,
        secure=price,
    )


def _price_of_secure(job: Job, server: Server, ids: Tensor, count: int) -> SecurePrice | None:
    """To one of these clients; where too few of them can be reached, to one of as many as are asked for."""
    if job.secure is None:
        return None
    if job.secure.why_too_few(len(ids)):
        ids = torch.arange(count)
    return secure_price(job.method, server, job.secure, cohort_context(job, server, ids, 1), job.fleet.dropout)


def _download_bytes(job: Job, server: Server, ids: Tensor) -> int:
    """Bytes to these clients once they are known; clients of one size get as much as each other.

    Where the server broadcasts, a client misses as many updates like the first as there are cohorts in the task.
    """
    updates = float(server.past["size/1"].sum()) * len(job.task) / len(ids) if "size/1" in server.past else math.inf
    cohort = cohort_context(job, server, ids, 2)
    members = cohort.members._replace(first=torch.zeros_like(cohort.ids, dtype=torch.bool))
    cohort = cohort._replace(members=members)
    size = job.method.fit.sizes(cohort) if job.method.fit else torch.zeros_like(cohort.ids)
    alike = [(size == one).nonzero()[:, 0] for one in size.unique()]
    whole = [int(nbytes(outgoing(job.method, server, cohort.at(k[:1])))[0]) for k in alike]
    return sum(round(min(one, updates)) * len(k) for one, k in zip(whole, alike, strict=True))


def _shorten_job(job: Job) -> Job:
    """The same job, a few local steps long, tested on few samples; in the open, as few clients make no sum."""
    local = job.method.local
    short = local.each_phase(lambda phase: phase._replace(steps=min(_COST_STEPS, phase.steps or _COST_STEPS)))
    method = job.method._replace(local=short)
    task, fleet = job.task.tested_on(2 * EVALUATED_AT_ONCE), _slow_down_fleet(job, method.local)
    return job._replace(method=method, task=task, fleet=fleet, secure=None)


def _slow_down_fleet(job: Job, local: Local) -> Fleet:
    """Devices that take as long for this training as they did for the job's, so that deadlines mean the same."""
    fleet, n = job.fleet, job.task.train.count
    if "speed" not in fleet.capacity:
        return fleet
    speed = fleet.capacity["speed"] * samples_visited(local, n) / samples_visited(job.method.local, n)
    return fleet._replace(capacity={**fleet.capacity, "speed": speed})


def _steps_in_round(job: Job, ids: Tensor) -> int:
    """Local steps these clients take in a round."""
    steps = 0
    for phase in job.method.local.phases + job.method.local.wrapped_phases:
        batches = -(-job.task.train.count[ids] // phase.batch)
        steps += phase.steps * len(ids) if phase.steps else int(batches.sum()) * phase.epochs
    return steps


def _samples_evaluated(job: Job, clients: int) -> int:
    """Samples that pass through a model in one evaluation of so many clients."""
    task, own = job.task, 0
    if task.test is not None:
        own = int(task.test.count.double().mean() * min(clients, len(task)) * 2)
    return max(1, own + (len(task.test_all[1]) if task.test_all is not None else 0))


def _total_bytes(sizes: Sizes) -> int:
    return sum(int(x.sum()) for x in sizes.values())


if __name__ == "__main__":
    try:
        print(json.dumps(cost_values(run_cost_trial(study_from(json.load(sys.stdin))))))
    except SparingError as error:
        sys.stderr.write(str(error))
        raise SystemExit(2) from None
