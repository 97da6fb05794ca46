"""A task: anyone's model, data and loss."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparing.core.errors import ConfigError, DataError, SparingError
from sparing.data.clients import (
    Clients,
    Pair,
    check_client_samples,
    check_no_empty_client,
    check_same_scale,
    check_sample_values,
    clients_from_pairs,
)
from sparing.data.collected import is_dataset
from sparing.data.inputs import Samples
from sparing.train.losses import Loss, default_loss, squared_error
from sparing.train.named_metrics import Metric, read_metrics, usual_metric

__all__ = ["Clients", "Task"]


class Task:
    """What is learned: a model, the clients' samples, and what counts as an error.

    `model` is an nn.Module, whose current weights are the start, or a function without arguments that builds one.
    `train` has one (x, y) per client: numpy arrays, tensors or lists, or a torch Dataset or DataLoader, which is read
    once. x may also be a dict of arrays, the model's keyword arguments, or a tuple of them, its positional ones. `test`
    is one (x, y) for everybody, or one per client; then the global test set is all of them together. `loss(output, y)`
    gives one number per sample `[B]`; without it, cross entropy for integer y and mean squared error for float y. It is
    given what the model gives, of Hugging Face's outputs the logits; accuracy and the losses named here look at the
    first tensor of a tuple. Integer y `[n, T]` are sequences, in which -100 is ignored; under cross entropy the loss is
    the mean over all tokens of a batch. Clients in `held_out` never train; they are the new clients of an evaluation.
    With test sets per client, `test_all` may be another global one. `probe` is one (x, y) that the server itself holds,
    for methods that look at a gradient there; it should be no test data.

    `metric` is what counts, or a list of them, of which the first is what tables rank by: a name (accuracy, top5,
    macro_f1, auc, multilabel_accuracy, multilabel_f1, mse, mae, r2, perplexity, loss), a function of (outputs, targets)
    that gives a number, or a metric of torchmetrics. Without it, accuracy, or the loss where targets are values. More
    is better, unless the function has `higher_is_better = False`.
    `name` stands in tables and reports; without it, the name of the model's class or of the function.

    >>> import torch
    >>> from torch import nn
    >>> x, y = torch.rand(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    >>> task = Task(lambda: nn.Linear(2, 2), train=[(x[:4], y[:4]), (x[4:], y[4:])], test=(x, y))
    >>> len(task), task.train.count.tolist(), task.build(seed=0).weight.shape
    (2, [4, 2], torch.Size([2, 2]))
    """

    train: Clients
    test: Clients | None  # one test set per client
    test_all: tuple[Samples, Tensor] | None  # the global one
    loss: Loss
    name: str
    held_out: Tensor  # int64 [h] ids
    samples: int  # of the clients that train
    validation: Clients | None  # one set per client, to choose settings by
    probe: tuple[Samples, Tensor] | None  # the server's own samples
    metrics: tuple[Metric, ...]  # the first is what tables rank by

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        train: Sequence[Pair] | Clients,
        test: Pair | Sequence[Pair] | Clients | None = None,
        loss: Loss | None = None,
        name: str | None = None,
        held_out: Sequence[int] = (),
        test_all: Pair | None = None,
        validation: Sequence[Pair] | Clients | None = None,
        probe: Pair | None = None,
        metric: Any = None,
    ):
        if not callable(model):
            raise ConfigError(f"model is {model!r}; give an nn.Module or a function without arguments that builds one")
        self.model, self.name = model, _task_name(name, model)
        labels = loss is None
        self.train = _check_set(clients_from_pairs("train", train), "train", labels)
        check_no_empty_client(self.train, "train")
        self.test, self.test_all = _test_sets(test, labels)
        if test_all is not None:
            self.test_all = _single_set(test_all, "test_all", labels)
        self.validation = (
            None
            if validation is None
            else _check_set(clients_from_pairs("validation", validation), "validation", labels)
        )
        self.probe = None if probe is None else _single_set(probe, "probe", labels)
        for what, clients in (("test", self.test), ("validation", self.validation)):
            if clients is not None and len(clients) != len(self.train):
                raise DataError(
                    f"{what} has {len(clients)} clients but train has {len(self.train)}: give one {what} set per client"
                    + (", or a single (x, y) for everybody" if what == "test" else "")
                )
        for what, x in self.others():
            check_same_scale(self.train.x, x, what)
        self.loss = loss or default_loss(self.train.y)
        usual = usual_metric(self.train.y, self.loss)
        self.metrics = (usual,) if metric is None else _fitting_metrics(metric, self.loss)
        self.held_out = _check_held_out(held_out, len(self.train))
        self.samples = int(self.train.count.sum()) - int(self.train.count[self.held_out].sum())

    def __len__(self) -> int:
        """How many clients there are."""
        return len(self.train)

    def others(self) -> list[tuple[str, Samples]]:
        """The samples that nobody trains on, by the name of their set."""
        sets = [("test", self.test), ("validation", self.validation)]
        found = [(what, clients.x) for what, clients in sets if clients is not None]
        alone = [("test" if self.test is None else "test_all", self.test_all), ("probe", self.probe)]
        return found + [(what, pair[0]) for what, pair in alone if pair is not None]

    def build(self, seed: int = 0) -> nn.Module:
        """A fresh model at its starting weights. The seed matters where `model` is a function; no global RNG moves."""
        if isinstance(self.model, nn.Module):
            return copy_model(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                model = self.model()
            except SparingError:
                raise
            except Exception as error:
                said = f"{type(error).__name__}: {error}".splitlines()[0]
                raise ConfigError(
                    f"the function given as model failed ({said}): let it build the network on the CPU, without "
                    "arguments; the study's device says where it trains"
                ) from error
        if not isinstance(model, nn.Module):
            raise ConfigError(f"the function given as model returned {model!r}; it must return an nn.Module")
        return model

    def measured_by(self, metrics: Sequence[Any]) -> "Task":
        """The same task with these metrics."""
        other = copy.copy(self)
        other.metrics = _fitting_metrics(list(metrics), self.loss)
        return other

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


def _task_name(name: str | None, model: Any) -> str:
    """The given name, or that of the model's class or of the function that builds it."""
    if name is None:
        found = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "")
        return found if found.isidentifier() else "own task"
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"the task's name is {name!r}; give it some letters, such as name='cars'")
    return " ".join(name.split())


def _fitting_metrics(given: Any, loss: Loss) -> tuple[Metric, ...]:
    metrics = read_metrics(given)
    if loss is squared_error and any(one.of_loss is not None for one in metrics):
        raise ConfigError("the metric 'perplexity' is of classes, but the targets are values; choose mse or r2")
    return metrics


def copy_model(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"the model ({type(model).__name__}) cannot be copied ({said}): copy.deepcopy must be able to"
        ) from error


def _check_held_out(ids: Sequence[int], clients: int) -> Tensor:
    for i in ids:
        if not isinstance(i, int | np.integer):
            raise ConfigError(f"held_out names {i!r}, which is no client: give whole numbers from 0 to {clients - 1}")
    out = torch.tensor(sorted({int(i) for i in ids}), dtype=torch.int64)
    if len(out) and (int(out[0]) < 0 or int(out[-1]) >= clients):
        odd = int(out[0]) if int(out[0]) < 0 else int(out[-1])
        raise ConfigError(f"held_out names client {odd}; there are clients 0 to {clients - 1}")
    if len(out) >= clients:
        raise ConfigError(f"held_out leaves nobody to train: all {clients} clients are in it; name fewer")
    return out


def _check_set(data: Clients, what: str, labels: bool) -> Clients:
    check_client_samples(data, what, labels)
    return data


def _single_set(pair: Pair, what: str, labels: bool) -> tuple[Samples, Tensor]:
    """One (x, y) that is no client's."""
    try:
        held = Clients.of([pair])
    except DataError as error:
        raise DataError(str(error).replace("client 0", what, 1)) from None
    if not len(held.x):
        raise DataError(f"{what} has no samples (0 of them): leave it out or give it some")
    nobody = held.count[:0]
    check_sample_values(replace(held, start=nobody, count=nobody), what, labels)
    return held.x, held.y


def _is_single_pair(test: Any) -> bool:
    """Whether this is one (x, y) and not one per client."""
    if is_dataset(test):
        return True
    if not isinstance(test, tuple | list) or len(test) != 2:
        return False
    if is_dataset(test[0]) or is_dataset(test[1]):
        return False
    if isinstance(test[0], Tensor | np.ndarray | Mapping) or isinstance(test[1], Tensor | np.ndarray):
        return True
    return isinstance(test, tuple) and not isinstance(test[0], tuple)


def _test_sets(test: Any, labels: bool) -> tuple[Clients | None, tuple[Samples, Tensor] | None]:
    """The per-client test sets and the global one."""
    if test is None:
        return None, None
    if _is_single_pair(test):
        return None, _single_set(test, "test", labels)
    clients = _check_set(clients_from_pairs("test", test), "test", labels)
    return clients, (clients.x, clients.y)
