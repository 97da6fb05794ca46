"""What a run is: everything that must be the same when it is resumed, each under a name of its own.

Samples count by their digests. Functions (the loss, the accuracy) count by what they give on a fixed batch, with a
model whose weights were moved a little: one that has not learned yet may hide what tells two losses apart.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparing.core import tree
from sparing.core.context import context
from sparing.core.errors import CheckpointError
from sparing.data.clients import Clients
from sparing.data.inputs import Samples, sample_tensors
from sparing.engines.engine import Job
from sparing.engines.evaluation import asked_for
from sparing.runs.study import Study
from sparing.train.evaluate import evaluate_all
from sparing.train.losses import accuracy, sample_losses
from sparing.train.model_call import main_tensor
from sparing.train.named_metrics import LOSS

_IDENTITY_SAMPLES = 16
_IDENTITY_TOLERANCE = 1e-3  # another machine rounds differently, another function gives something else
RunIdentity = dict[str, Any]
_TERMS = {
    "study": "the study in config.yaml",
    "model": "the initial model",
    "train": "the training samples",
    "test": "the test samples",
    "validation": "the validation samples",
    "probe": "the server's probe samples",
    "held out": "which clients are held out",
    "fleet": "the file fleet.trace or fleet.capacity",
    "loss": "the loss",
    "accuracy": "how accuracy is measured",
    "metrics": "the task's metrics",
}


def run_identity(study: Study, job: Job) -> RunIdentity:
    task = job.task
    losses, hits = _losses_and_hits(job)
    asked = [name for name in asked_for(task) if task.metrics != (LOSS,)]
    return {
        "study": study.fingerprint(),
        "model": tree.tree_sha256(job.first_tensors),
        "train": _digest_of_sets(task.train),
        "test": _digest_of_sets(task.test, task.test_all),
        "validation": _digest_of_sets(task.validation),
        "probe": _digest_of_sets(task.probe),
        "held out": _digest_of_sets((task.held_out,)),
        "fleet": _digest_of_sets(job.fleet.trace, tuple(job.fleet.capacity.values())),
        "loss": losses,
        "accuracy": hits,
        **({"metrics": " ".join(asked)} if asked else {}),
    }


def _digest_of_sets(*sets: Clients | tuple[Samples, ...] | None) -> str:
    found = hashlib.sha256()
    for one in sets:
        tensors = (one.start, one.count, one.x, one.y) if isinstance(one, Clients) else one or ()
        named = {name: x for i, one in enumerate(tensors) for name, x in sample_tensors(one, str(i))}
        found.update(tree.tree_sha256(named).encode())
    return found.hexdigest()


def _losses_and_hits(job: Job) -> tuple[list[float], list[float]]:
    """What the loss and the accuracy of each sample come to."""
    data, found = job.task.train, []

    def look(output: Any, y: Tensor) -> Tensor:
        first = main_tensor(output)
        hits = accuracy(first, y) if first is not None else torch.zeros(0)
        found.extend([sample_losses(job.task.loss, output, y).double().tolist(), hits.double().tolist()])
        return torch.zeros(len(y), device=y.device)

    moved = {
        name: _nudge_weights(name, x) if name in job.method.layout.params else x for name, x in job.initial.items()
    }
    static = job.method.local.buffers == "static"
    evaluate_all(
        job.model, look, job.network(moved), data.x[:_IDENTITY_SAMPLES], data.y[:_IDENTITY_SAMPLES], static=static
    )
    return found[0], found[1]


def _nudge_weights(name: str, x: Tensor) -> Tensor:
    """Each weight up to a tenth larger or smaller, the same way every time; zeros too, where there is nothing else."""
    one = torch.zeros(1, dtype=torch.int64)
    by = context(0, 0, 0, one, one, 1, 1).uniform(f"identity/{name}", x.numel()).reshape(x.shape).to(x.device, x.dtype)
    return x * (0.9 + 0.2 * by) if bool(x.any()) else 0.2 * by - 0.1


def refuse_other_identity(saved: RunIdentity, now: RunIdentity, checkpoint: Path) -> None:
    """The run in the folder is not the one that is about to go on."""
    other = [name for name in now if not _same_value(saved.get(name), now[name])]
    if not other:
        return
    if other[0] == "study":
        raise CheckpointError(
            f"{checkpoint} belongs to another config than the one beside it; undo the change to config.yaml, or start "
            "a new run in another folder"
        )
    raise CheckpointError(
        f"{checkpoint} belongs to another task: {_TERMS[other[0]]} changed since the run began; pass the task that it "
        "began with, or start a new run in another folder"
    )


def _same_value(a: Any, b: Any) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_close_numbers(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def _close_numbers(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_IDENTITY_TOLERANCE, abs_tol=_IDENTITY_TOLERANCE) or (
        math.isnan(a) and math.isnan(b)
    )
