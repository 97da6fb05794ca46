"""How the work is laid out on this machine: the path of local training, clients at once, threads, and the bank."""

import os

import torch

from sparing.core.errors import ConfigError
from sparing.core.round import first_client, first_row
from sparing.core.tree import Tree
from sparing.engines.engine import Job
from sparing.run.config import PlanSection
from sparing.run.probe import agrees
from sparing.task.implicit import can_imply, history
from sparing.task.local import default_path

MEMORY = 1 << 30  # bytes of client models and updates in flight
COPIES = 8  # start, after, update, gradient and what the codecs need
CHUNKS = {"stacked": 16, "implicit": 32}  # clients at once on a CPU: their weights should stay in its caches
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
        each = COPIES * bytes_of(job.initial) + state
        each += history(job.model, job.method.local, most_samples(job)) if path == "implicit" else 0
        chunk = max(1, min(cohort, MEMORY // max(each, 1), CHUNKS.get(path, 256) if device.type == "cpu" else 256))
    if threads == "auto":
        many = path in ("loop", "implicit") and device.type == "cpu" and engine == "vector"
        threads = os.cpu_count() or 1 if many else 1
    if bank == "auto":
        each = state + bytes_of(first_row(job.method, job.initial))
        bank = "file" if each * len(job.task) > BANK else "memory"
    if plan.parcels == "kept" and engine != "debug":
        raise ConfigError(f"plan.parcels is kept, but engine {engine!r} only counts their bytes; set engine: debug")
    chosen = {"path": path, "chunk": 1 if engine == "debug" else chunk, "threads": threads, "bank": bank}
    return plan.model_copy(update=chosen)


def settle_path(path: str, engine: str, job: Job) -> str:
    device = next(iter(job.initial.values())).device
    if path == "auto":
        if engine != "vector":
            return "loop"
        samples = most_samples(job)
        offers = default_path(job.model, device, job.method.local, samples), default_path(job.model, device)
        return next((offer for offer in offers if works(offer, job)), "loop")
    if not works(path, job):
        raise ConfigError(f"plan.path is {path}, but this model trains differently or not at all by it; use loop")
    return path


def works(path: str, job: Job) -> bool:
    """Whether this path trains as the loop does, in every size of the model."""
    fits = path != "implicit" or all(can_imply(model, job.method.local) for model in job.sizes or (job.model,))
    return path == "loop" or (fits and agrees(job, path))


def most_samples(job: Job) -> int:
    return int(job.task.train.count.max())


def bytes_of(tree: Tree) -> int:
    return sum(x.numel() * x.element_size() for x in tree.values())
