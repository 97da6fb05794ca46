"""Trials: how many clients a second train by each way of laying out the work, on this machine.

A trial is a real round of a few clients from the middle of the first cohort, until the last of them is folded in; where
a client takes many steps, it is a few steps long.
"""

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.core.errors import SparingError
from sparing.core.fold import Collect, Fold
from sparing.core.method import Phase
from sparing.core.round import Server, first_client, first_row, first_server
from sparing.engines.engine import Job
from sparing.engines.vector import ReturnedChunk, SentChunk, Vector
from sparing.fleet.timing import samples_visited
from sparing.storage.bank import MemoryBank
from sparing.train.batches import phase_steps
from sparing.train.evaluate import evaluate_all
from sparing.train.paths import path_called

TRIAL_STEPS = 3
"""Local steps of a trial, unless the implicit path is among those tried: its cost grows faster than its steps."""
TRIAL_VISITS = 400
"""Samples that a client may visit in a phase of a trial of the implicit path."""
_TRIAL_TURNS = 3
_TOO_SLOW = 1.5
"""Whoever is so many times slower than the fastest is not tried again."""
_ROUGH_PACE = {"cpu": (5e-4, 1.5e10), "cuda": (5e-5, 5e12)}
"""Seconds for a step of one client, and multiplications a second: a rough guess, the same on every machine."""


class WorkLayout(NamedTuple):
    """A way to lay out the work."""

    path: str
    chunk: int
    threads: int


LayoutSpeeds = dict[WorkLayout, float]
"""Clients a second; 0 where the trial failed."""


def guess_training_seconds(job: Job, cohort: int) -> float:
    """Seconds of training in the whole run, from its steps and multiplications alone: nothing is timed."""
    kind = next(iter(job.initial.values())).device.type
    local, n = job.method.local, max(1, round(float(job.task.train.count.double().mean())))
    steps = sum(phase_steps(phase, [n])[0] for phase in local.phases + local.wrapped_phases)
    work = (
        3 * _multiplications(job) * int(samples_visited(local, torch.tensor([n])))
    )  # forward, and twice that backward
    step, pace = _ROUGH_PACE[kind]
    return job.rounds * cohort * (step * steps + work / pace)


def _multiplications(job: Job) -> int:
    """By weights, for one sample forward."""
    model, found = copy.deepcopy(job.model), [0]

    def add(layer: nn.Module, _: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        for weight in layer.parameters(recurse=False):
            if weight.ndim > 1 and weight.numel() and isinstance(output, Tensor):
                found[0] += weight.numel() * max(1, output.numel() // max(1, weight.shape[0]))

    for layer in model.modules():
        layer.register_forward_hook(add)
    x, y, static = job.task.train.x[:1], job.task.train.y[:1], job.method.local.buffers == "static"
    evaluate_all(model, job.task.loss, job.rest.complete(job.initial), x, y, static=static)
    return found[0]


def race_layouts(
    ways: list[WorkLayout], trial: Callable[[WorkLayout], float], clients: Callable[[WorkLayout], int], until: float
) -> LayoutSpeeds:
    """The best of a few trials of each way; no more of those that are clearly slower, nor of what takes too long.

    The first is tried in any case.
    """
    best: LayoutSpeeds = {}
    each = 0.0  # seconds that a client of a trial takes at least
    for turn in range(_TRIAL_TURNS):
        for way in ways:
            began = synchronized_time()
            if best and began + each * clients(way) > until:
                continue
            best[way] = max(best.get(way, 0.0), trial(way))
            took = (synchronized_time() - began) / clients(way)
            each = min(each or took, took)
        top = max(best.values())
        ways = [way for way in ways if best.get(way, 0.0) * _TOO_SLOW >= top]
        if turn and len(ways) == 1:
            break
    return best


def layout_trial(job: Job, cohort: int, steps: int | None) -> Callable[[WorkLayout], float]:
    """The function that tries one way; the first trial of each, to warm up, is not counted."""
    ids = job.fleet.cohort(job.seed, 1, len(job.task), cohort)
    ids = ids[torch.argsort(job.task.train.count[ids], stable=True)]
    device = next(iter(job.initial.values())).device
    template = first_row(job.method, job.initial)
    rows = MemoryBank(template, len(job.task), device) if template else None
    server = first_server(job.method, job.initial, len(job.task), rows, job.gradient)
    warm: set[WorkLayout] = set()

    def timed(way: WorkLayout, steps: int | None) -> float:
        few = clients_in_trial(way, len(ids))
        some = ids[(len(ids) - few) // 2 :][:few]
        n = job.task.train.count[some]
        short = _shorten_phases(job, steps, n)
        graph = job.graph and way.path in ("stacked", "compiled")
        laid_out = short._replace(path=way.path, chunk=way.chunk, threads=way.threads, graph=graph)
        engine = _TimedEngine(laid_out, MemoryBank(first_client(job.method, job.initial), len(job.task), device))
        began = synchronized_time()
        engine.round(server, some, 1)
        share = int(samples_visited(short.method.local, n).sum()) / int(samples_visited(job.method.local, n).sum())
        return share * len(some) / (engine.ended - began)

    def trial(way: WorkLayout) -> float:
        try:
            if way not in warm:
                timed(way, 1 if device.type == "cpu" else steps)
                warm.add(way)
            return timed(way, steps)
        except (SparingError, RuntimeError):
            return 0.0

    return trial


def clients_in_trial(way: WorkLayout, cohort: int) -> int:
    """How many clients show what this way is worth."""
    return min(cohort, 4 * way.threads if path_called(way.path).in_turn else way.chunk)


def _shorten_phases(job: Job, steps: int | None, n_K: Tensor) -> Job:
    """The same job with so many steps at most in each phase; as it is where no client takes more."""
    local = job.method.local

    def short(phase: Phase) -> Phase:
        long = steps is not None and max(phase_steps(phase, n_K.tolist())) > steps
        return phase._replace(steps=steps) if long else phase

    return job._replace(method=job.method._replace(local=local.each_phase(short)))


class _TimedEngine(Vector):
    """The engine, remembering when it was done with the last clients: trained, coded, and folded in."""

    ended = 0.0

    def clients(self, server: Server, fold: Fold | Collect, sent: SentChunk) -> ReturnedChunk:
        out = super().clients(server, fold, sent)
        self.ended = synchronized_time()
        return out


def synchronized_time() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
