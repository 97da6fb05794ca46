"""How the work is laid out on this machine: the path of local training, clients at once, threads, and the bank."""

import os

import torch
from torch import nn

from sparing.core.errors import ConfigError
from sparing.core.protocols import Method
from sparing.core.round import first_client
from sparing.core.tree import Tree
from sparing.run.config import PlanSection
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


def settle_plan(
    plan: PlanSection, engine: str, model: nn.Module, method: Method, cohort: int, clients: int
) -> PlanSection:
    """Replace every "auto" by a choice."""
    tensors: Tree = {name: x[None] for name, x in model.state_dict().items()}
    device = next(iter(tensors.values())).device
    state = bytes_of(first_client(method, tensors))
    path = plan.path
    if path == "auto":
        path = "loop" if engine == "debug" or default_path(model, device) == "loop" else "stacked"
    chunk = plan.chunk
    if chunk == "auto":
        fitting = MEMORY // max(COPIES * bytes_of(tensors) + state, 1)
        chunk = max(1, min(cohort, fitting, 16 if path == "stacked" and device.type == "cpu" else 256))
    threads = plan.threads
    if threads == "auto":
        threads = os.cpu_count() or 1 if path == "loop" and device.type == "cpu" and engine == "vector" else 1
    bank = plan.bank if plan.bank != "auto" else "file" if state * clients > BANK else "memory"
    return PlanSection(path=path, chunk=1 if engine == "debug" else chunk, threads=threads, bank=bank)


def bytes_of(tree: Tree) -> int:
    return sum(x.numel() * x.element_size() for x in tree.values())
