"""How the work is laid out on this machine: the path of local training, clients at once, threads, and the bank."""

import os
from typing import Literal

import torch

from sparing.core.errors import ConfigError
from sparing.core.round import first_client, first_row
from sparing.core.tree import Tree
from sparing.engines.engine import Job
from sparing.run.config import PlanSection
from sparing.run.probe import can_stack
from sparing.task.local import default_path

MEMORY = 1 << 30  # bytes of client models and updates in flight
COPIES = 8  # start, after, update, gradient and what the codecs need
BANK = 2 << 30  # bytes of client state that may live in memory


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}; use auto, cpu or cuda")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but this machine has no usable GPU; use cpu or auto")
    return device


def settle_plan(plan: PlanSection, engine: str, job: Job, cohort: int) -> PlanSection:
    """Replace every "auto" by a choice."""
    device = next(iter(job.initial.values())).device
    state = bytes_of(first_client(job.method, job.initial))
    path = settle_path(plan.path, engine, job)
    chunk, threads, bank = plan.chunk, plan.threads, plan.bank
    if chunk == "auto":
        fitting = MEMORY // max(COPIES * bytes_of(job.initial) + state, 1)
        chunk = max(1, min(cohort, fitting, 16 if path == "stacked" and device.type == "cpu" else 256))
    if threads == "auto":
        threads = os.cpu_count() or 1 if path == "loop" and device.type == "cpu" and engine == "vector" else 1
    if bank == "auto":
        each = state + bytes_of(first_row(job.method, job.initial))
        bank = "file" if each * len(job.task) > BANK else "memory"
    if plan.parcels == "kept" and engine != "debug":
        raise ConfigError(f"plan.parcels is kept, but engine {engine!r} only counts their bytes; set engine: debug")
    chosen = {"path": path, "chunk": 1 if engine == "debug" else chunk, "threads": threads, "bank": bank}
    return plan.model_copy(update=chosen)


def settle_path(path: str, engine: str, job: Job) -> Literal["loop", "stacked"]:
    device = next(iter(job.initial.values())).device
    if path == "auto":
        stack = engine == "vector" and default_path(job.model, device) == "stacked" and can_stack(job)
        return "stacked" if stack else "loop"
    if path == "stacked" and not can_stack(job):
        raise ConfigError("plan.path is stacked, but this model trains differently when clients are stacked; use loop")
    return "stacked" if path == "stacked" else "loop"


def bytes_of(tree: Tree) -> int:
    return sum(x.numel() * x.element_size() for x in tree.values())
