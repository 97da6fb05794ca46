"""From the `task` section of a study to a Task: load a dataset, share it out, name a network."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from sparing.data import load_dataset
from sparing.data.augment import read_augmentations
from sparing.data.clients import Clients
from sparing.data.dataset import Dataset
from sparing.data.options import name_and_options
from sparing.models import build_network
from sparing.split import DatasetPartition, partition_dataset
from sparing.split.laws import SPLIT_LAWS
from sparing.split.styles import Style, samples_in_style
from sparing.tasks.task import Task

_USUAL_CLIENTS = 20  # clients where the law does not say how many and the study neither


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
    pool, parts = load_and_partition(data, clients, split, seed, test, validation, held_out, probe)
    shape, classes = tuple(pool.x.shape[1:]), pool.classes
    train = _clients_of_parts(pool, parts.train, parts.shifts, read_augmentations(augment, shape))
    official = None if parts.global_test is None else torch.from_numpy(parts.global_test)
    task = Task(
        lambda: build_network(model, shape, classes),
        train,
        _clients_of_parts(pool, parts.test, parts.shifts),
        name=pool.name,
        held_out=parts.held_out.tolist(),
        test_all=None if official is None else (pool.x[official], pool.y[official]),
        validation=_clients_of_parts(pool, parts.validation, parts.shifts) if validation else None,
        probe=(pool.x[parts.probe], pool.y[parts.probe]) if len(parts.probe) else None,
    )
    task.build()  # an unknown network should be refused here, not at the first round
    return task


def load_and_partition(
    data: str | Mapping[str, Any],
    clients: int | None,
    split: str | Mapping[str, Any],
    seed: int,
    test: float = 0.25,
    validation: float = 0.0,
    held_out: int | float = 0,
    probe: int | float = 0,
) -> tuple[Dataset, DatasetPartition]:
    """The dataset and who holds what of it."""
    name, options = name_and_options("data", data)
    pool = load_dataset(name, **options)
    law = split if isinstance(split, str) else next(iter(split), "")
    count = _USUAL_CLIENTS if clients is None and law in (*SPLIT_LAWS, "styles") else clients
    return pool, partition_dataset(pool, split, count, seed, test, validation, held_out, probe)


def _clients_of_parts(
    pool: Dataset, parts: Sequence[np.ndarray], shifts: Sequence[Style] | None, augment: tuple[Any, ...] = ()
) -> Clients:
    """The clients' samples end to end, each in its own style where there is one."""
    order = torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64))
    count = torch.tensor([len(part) for part in parts])
    return Clients(samples_in_style(pool.x, parts, shifts), pool.y[order], count.cumsum(0) - count, count, augment)
