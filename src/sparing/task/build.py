"""Ready-made tasks."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import ConfigError, nearest
from sparing.task import split as splits
from sparing.task.clients import Clients
from sparing.task.data import digits
from sparing.task.models import network
from sparing.task.task import Task

SPLITS = ("iid", "dirichlet")
DATA = ("digits",)
SKEWED: Mapping[str, float] = MappingProxyType({"dirichlet": 0.3})


def build_task(data: str, clients: int, split: str | Mapping[str, float], model: str, seed: int) -> Task:
    """A task by the name of its data, as the `task` section of a study describes it."""
    if data not in DATA:
        raise ConfigError(f"no data is called {data!r}; {nearest(data, DATA)}")
    return digits_task(clients, split, model, seed)


def digits_task(
    clients: int = 20, split: str | Mapping[str, float] = SKEWED, model: str = "cnn", seed: int = 0
) -> Task:
    """Handwritten digits (8x8) shared out to clients, a quarter of each client's samples kept for testing.

    `split` is {"dirichlet": alpha} or "iid"; the seed decides who owns what.

    >>> task = digits_task(clients=10)
    >>> len(task), int(task.train.count.sum() + task.test.count.sum())
    (10, 1797)
    """
    x, y = digits()
    labels = y.numpy()
    train, test = splits.train_test(labels, parts(labels, clients, split, seed), seed)
    shape = tuple(x.shape[1:])
    task = Task(lambda: network(model, shape, 10), pick(x, y, train), pick(x, y, test), name="digits")
    task.build()  # an unknown name should be refused here, not at the first round
    return task


def parts(labels: np.ndarray, clients: int, split: str | Mapping[str, float], seed: int) -> splits.Parts:
    if split == "iid":
        return splits.iid(labels, clients, seed)
    if isinstance(split, Mapping) and set(split) == {"dirichlet"}:
        return splits.dirichlet(labels, clients, split["dirichlet"], seed)
    name = split if isinstance(split, str) else next(iter(split), "")
    raise ConfigError(f'no split is called {split!r}: {nearest(str(name), SPLITS)} Write "iid" or {{"dirichlet": 0.3}}')


def pick(x: Tensor, y: Tensor, indices: splits.Parts) -> Clients:
    order = torch.from_numpy(np.concatenate(indices))
    count = torch.tensor([len(part) for part in indices])
    return Clients(x[order], y[order], count.cumsum(0) - count, count)
