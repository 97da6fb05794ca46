"""Tasks of which this machine holds a part: a server that knows how many samples there are, a node with its own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sparing.data.augment import Augment
from sparing.data.clients import Pair
from sparing.tasks.task import Task
from sparing.train.losses import Loss


def task_without_samples(
    model: nn.Module | Callable[[], nn.Module], count: Tensor, example: Pair, loss: Loss | None = None, **other: Any
) -> Task:
    """A server's: client i has count[i] samples, none of which is here. The model is tried on the example."""
    task = Task(model, train=[example], loss=loss, **other)
    task.train = replace(task.train, start=torch.full_like(count, len(task.train.y)), count=count)
    task.samples = int(count.sum())
    return task


def task_of_client(
    model: nn.Module | Callable[[], nn.Module],
    client: int,
    clients: int,
    train: Pair,
    test: Pair | None = None,
    loss: Loss | None = None,
    augment: Callable[[tuple[int, ...]], tuple[Augment, ...]] | None = None,
    **other: Any,
) -> Task:
    """A node's: of all clients, the samples of one. `augment` is told the shape of a sample."""
    task = Task(model, train=[train], test=None if test is None else [test], loss=loss, **other)
    if augment is not None and isinstance(task.train.x, Tensor):
        task.train = replace(task.train, augment=augment(tuple(task.train.x.shape[1:])))
    nobody = torch.zeros(clients, dtype=torch.int64)

    def alone(own: Any) -> Any:
        return replace(own, start=nobody, count=nobody.index_fill(0, torch.tensor([client]), len(own.y)))

    task.probe = (task.train.x[:1], task.train.y[:1])  # the server's own is the one that counts
    task.train = alone(task.train)
    task.test = None if task.test is None else alone(task.test)
    return task
