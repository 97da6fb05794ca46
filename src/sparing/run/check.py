"""What a study will cost, found out before it runs: bytes counted, time and memory from one short trial.

The trial plays one chunk of the first cohort for a few local steps in a process of its own, so that its peak memory is
the run's own; nothing is written.
"""

import json
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

import torch

from sparing.core.errors import ConfigError, SparingError
from sparing.core.round import begin, client, first_client, first_server, incoming, outgoing, settle
from sparing.core.tree import expand
from sparing.core.wire import nbytes
from sparing.engines.engine import Job, chunks, context
from sparing.run.config import Study, study_from
from sparing.run.loop import cohort_size
from sparing.run.start import named_task, settled

STEPS = 3


class Cost(NamedTuple):
    """Per round unless it says otherwise; bytes up are those of a trial update where the data decides them."""

    clients: int
    samples: int
    parameters: int
    cohort: int
    plan: dict[str, Any]
    down_bytes: int
    up_bytes: int
    first_bytes: int  # down, in the first round, when every client is new
    seconds: float
    peak_mb: float  # of the whole run
    state_mb: float  # all clients' state, once every one has taken part


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
    """One chunk, a few steps, everything a round does."""
    job, study = settled(study, named_task(study))
    count = cohort_size(len(job.task) - len(job.task.held_out), study.sample)
    server = first_server(job.method, job.initial, len(job.task))
    cohort = context(job, server, job.fleet.cohort(job.seed, 1, len(job.task), count), 1)
    first = max(chunks(cohort, job.chunk, job.method.fit), key=lambda ctx: int(ctx.n.sum()))
    known = cohort.at(slice(0, 1))._replace(first=torch.zeros(1, dtype=torch.bool, device=cohort.ids.device))
    state = expand(first_client(job.method, job.initial), len(first.ids))
    with torch.no_grad():
        fold = begin(job.method, server, cohort)
        down = outgoing(job.method, server, first)
        began = time.perf_counter()
        up, state = client(job.method, state, down, shortened(job).train, first)
        spent = time.perf_counter() - began
        incoming(job.method, server, fold, down, up, first)
        server, _ = settle(job.method, server, fold, cohort)
    share = steps_of(job, cohort) / min(STEPS * len(first.ids), steps_of(job, first))
    return Cost(
        clients=len(job.task),
        samples=int(job.task.train.count.sum()),
        parameters=job.method.layout.size,
        cohort=count,
        plan=study.plan.model_dump(),
        down_bytes=int(nbytes(outgoing(job.method, server, known))[0]) * count,
        up_bytes=int(nbytes(up).expand(len(first.ids)).double().mean() * count),
        first_bytes=int(nbytes(down).expand(len(first.ids)).double().mean() * count),
        seconds=spent * share,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        state_mb=sum(x.numel() * x.element_size() for x in first_client(job.method, job.initial).values())
        * len(job.task)
        / 2**20,
    )


def shortened(job: Job) -> Job:
    """The same job, a few local steps long."""
    phases = tuple(phase._replace(steps=min(STEPS, phase.steps or STEPS)) for phase in job.method.local.phases)
    return job._replace(method=job.method._replace(local=job.method.local._replace(phases=phases)))


def steps_of(job: Job, ctx: Any) -> int:
    """Local steps these clients take in a round."""
    total = 0
    for phase in job.method.local.phases:
        per_epoch = -(-ctx.n // phase.batch)
        total += phase.steps * len(ctx.ids) if phase.steps else int(per_epoch.sum()) * phase.epochs
    return total


if __name__ == "__main__":
    try:
        print(json.dumps(trial(study_from(json.load(sys.stdin)))._asdict()))
    except SparingError as error:
        sys.stderr.write(str(error))
        raise SystemExit(2) from None
