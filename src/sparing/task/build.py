"""From the `task` section of a study to a Task: load a dataset, share it out, name a network."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sparing.task.clients import Clients
from sparing.task.data import load
from sparing.task.dataset import Dataset
from sparing.task.models import network
from sparing.task.options import named
from sparing.task.shift import Shift, laid_out
from sparing.task.split import Partition, partition
from sparing.task.split.study import LAWS
from sparing.task.task import Task
from sparing.train.augment import augments

MANY = 20  # clients where the law does not say how many and the study neither


def build_task(
    data: str | Mapping[str, Any],
    clients: int | None = None,
    split: str | Mapping[str, Any] = "iid",
    model: str | Mapping[str, Any] = "cnn",
    seed: int = 0,
    test: float = 0.25,
    validation: float = 0.0,
    held_out: int | float = 0,
    probe: int | float = 0,
    augment: Sequence[Any] = (),
) -> Task:
    """A task as a study describes it. The seed decides who owns what; the network is built later, from its own.

    >>> task = build_task("digits", clients=10, split={"dirichlet": 0.3})
    >>> len(task), int(task.train.count.sum() + task.test.count.sum())
    (10, 1797)
    """
    pool, parts = shared_out(data, clients, split, seed, test, validation, held_out, probe)
    shape, classes = tuple(pool.x.shape[1:]), pool.classes
    train = laid(pool, parts.train, parts.shifts, augments(augment, shape))
    official = None if parts.global_test is None else torch.from_numpy(parts.global_test)
    task = Task(
        lambda: network(model, shape, classes),
        train,
        laid(pool, parts.test, parts.shifts),
        name=pool.name,
        held_out=parts.held_out.tolist(),
        test_all=None if official is None else (pool.x[official], pool.y[official]),
        validation=laid(pool, parts.validation, parts.shifts) if validation else None,
        probe=(pool.x[parts.probe], pool.y[parts.probe]) if len(parts.probe) else None,
    )
    task.build()  # an unknown network should be refused here, not at the first round
    return task


def shared_out(
    data: str | Mapping[str, Any],
    clients: int | None,
    split: str | Mapping[str, Any],
    seed: int,
    test: float = 0.25,
    validation: float = 0.0,
    held_out: int | float = 0,
    probe: int | float = 0,
) -> tuple[Dataset, Partition]:
    """The dataset and who holds what of it."""
    name, options = named("data", data)
    pool = load(name, **options)
    law = split if isinstance(split, str) else next(iter(split), "")
    count = MANY if clients is None and law in (*LAWS, "styles") else clients
    return pool, partition(pool, split, count, seed, test, validation, held_out, probe)


def laid(
    pool: Dataset, parts: Sequence[np.ndarray], shifts: Sequence[Shift] | None, augment: tuple[Any, ...] = ()
) -> Clients:
    """The clients' samples end to end, each in its own style where there is one."""
    order = torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64))
    count = torch.tensor([len(part) for part in parts])
    return Clients(laid_out(pool.x, parts, shifts), pool.y[order], count.cumsum(0) - count, count, augment)
