"""A task: anyone's model, data and loss."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparing.core.errors import ConfigError, DataError
from sparing.task.clients import Clients, Pair, check_samples
from sparing.task.losses import Loss, default_loss

__all__ = ["Clients", "Task"]


class Task:
    """What is learned: a model, the clients' samples, and what counts as an error.

    `model` is an nn.Module, whose current weights are the start, or a function without arguments that builds one.
    `train` has one (x, y) per client: numpy arrays, tensors or lists. `test` is one (x, y) for everybody, or one per
    client; then the global test set is all of them together. `loss(output, y)` gives one number per sample `[B]`;
    without it, cross entropy for integer y and mean squared error for float y. Clients in `held_out` never train;
    they are the new clients of an evaluation. With test sets per client, `test_all` may be another global one. `probe`
    is one (x, y) that the server itself holds, for methods that look at a gradient there; it should be no test data.

    >>> import torch
    >>> from torch import nn
    >>> x, y = torch.rand(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> task = Task(lambda: nn.Linear(2, 2), train=[(x[:4], y[:4]), (x[4:], y[4:])], test=(x, y))
    >>> len(task), task.train.count.tolist(), task.build(seed=0).weight.shape
    (2, [4, 2], torch.Size([2, 2]))
    """

    train: Clients
    test: Clients | None  # one test set per client
    test_all: tuple[Tensor, Tensor] | None  # the global one
    loss: Loss
    name: str
    held_out: Tensor  # int64 [h] ids
    samples: int  # of the clients that train
    validation: Clients | None  # one set per client, to choose settings by
    probe: tuple[Tensor, Tensor] | None  # the server's own samples

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        train: Sequence[Pair] | Clients,
        test: Pair | Sequence[Pair] | Clients | None = None,
        loss: Loss | None = None,
        name: str = "task",
        held_out: Sequence[int] = (),
        test_all: Pair | None = None,
        validation: Clients | None = None,
        probe: Pair | None = None,
    ):
        if not callable(model):
            raise ConfigError(f"model is {model!r}; give an nn.Module or a function without arguments that builds one")
        self.model, self.name = model, name
        self.train = train if isinstance(train, Clients) else Clients.of(train)
        check_samples(self.train, "train", labels=loss is None)
        check_filled(self.train, "train")
        self.test, self.test_all = tests(test)
        if self.test is not None and len(self.test) != len(self.train):
            raise DataError(
                f"test has {len(self.test)} clients but train has {len(self.train)}: give one test set per client, "
                "or a single (x, y) for everybody"
            )
        if self.test_all is not None:
            check_samples(self.test or Clients.of([self.test_all]), "test", labels=loss is None)
        self.loss = loss or default_loss(self.train.y)
        self.held_out = checked_ids(held_out, len(self.train))
        self.samples = int(self.train.count.sum()) - int(self.train.count[self.held_out].sum())
        self.validation = validation
        if test_all is not None:
            self.test_all = Clients.of([test_all]).client(0)
        self.probe = None
        if probe is not None:
            held = Clients.of([probe])
            check_samples(held, "probe", labels=loss is None)
            check_filled(held, "probe")
            self.probe = held.client(0)

    def __len__(self) -> int:
        """How many clients there are."""
        return len(self.train)

    def build(self, seed: int = 0) -> nn.Module:
        """A fresh model at its starting weights. The seed matters where `model` is a function; no global RNG moves."""
        if isinstance(self.model, nn.Module):
            return copy.deepcopy(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = self.model()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the function given as model returned {model!r}; it must return an nn.Module")
        return model

    def on_validation(self) -> "Task":
        """The same task, evaluated on the validation sets."""
        if self.validation is None:
            raise ConfigError("evaluate.set is validation, but task.validation is 0; give it a share, such as 0.2")
        other = copy.copy(self)
        other.test, other.test_all = self.validation, (self.validation.x, self.validation.y)
        return other

    def tested_on(self, most: int) -> "Task":
        """The same task with at most so many samples in its global test set."""
        other = copy.copy(self)
        if self.test_all is not None:
            other.test_all = (self.test_all[0][:most], self.test_all[1][:most])
        return other

    def to(self, device: torch.device) -> "Task":
        """The same task with its samples where training happens."""
        moved = copy.copy(self)
        moved.train = self.train.to(device)
        moved.test = self.test.to(device) if self.test else None
        if self.test_all:
            moved.test_all = (self.test_all[0].to(device), self.test_all[1].to(device))
        if self.probe:
            moved.probe = (self.probe[0].to(device), self.probe[1].to(device))
        return moved


def checked_ids(ids: Sequence[int], clients: int) -> Tensor:
    out = torch.tensor(sorted(set(ids)), dtype=torch.int64)
    if len(out) and (int(out[0]) < 0 or int(out[-1]) >= clients):
        raise ConfigError(f"held_out names client {int(out[-1])}; there are clients 0 to {clients - 1}")
    if len(out) >= clients:
        raise ConfigError(f"held_out leaves nobody to train: all {clients} clients are in it; name fewer")
    return out


def check_filled(data: Clients, what: str) -> None:
    empty = (data.count < 1).nonzero().flatten()
    if len(empty):
        raise DataError(f"{what}: client {int(empty[0])} has no samples (0 of them): leave it out or give it some")


def is_pair(test: Any) -> bool:
    """Whether this is one (x, y) and not one per client."""
    if not isinstance(test, tuple | list) or len(test) != 2:
        return False
    return isinstance(test[0], Tensor | np.ndarray) or (isinstance(test, tuple) and not isinstance(test[0], tuple))


def tests(test: Any) -> tuple[Clients | None, tuple[Tensor, Tensor] | None]:
    """The per-client test sets and the global one."""
    if test is None:
        return None, None
    if is_pair(test):
        everybody = Clients.of([(test[0], test[1])])
        return None, (everybody.x, everybody.y)
    clients = test if isinstance(test, Clients) else Clients.of(test)
    return clients, (clients.x, clients.y)
