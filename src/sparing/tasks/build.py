"""From the `task` section of a study to a Task: load a dataset, share it out, name a network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sparing.core.errors import ConfigError
from sparing.data import load_dataset
from sparing.data.augment import read_augmentations
from sparing.data.clients import Clients
from sparing.data.dataset import Dataset
from sparing.data.options import name_and_options
from sparing.models import build_network
from sparing.split import DatasetPartition, partition_dataset
from sparing.split.laws import SPLIT_LAWS
from sparing.split.styles import Style, samples_in_style
from sparing.tasks.code import CodeCall, call_code, is_code, load_code
from sparing.tasks.own_data import (
    client_sets,
    dataset_from_sets,
    sample_shape,
    sample_shape_and_classes,
    sets_from_loader,
)
from sparing.tasks.task import Task
from sparing.train.losses import Loss

_USUAL_CLIENTS = 20  # clients where the law does not say how many and the study neither


def build_task(
    data: str | Mapping[str, Any],
    clients: int | None = None,
    split: str | Mapping[str, Any] | None = "iid",
    model: str | Mapping[str, Any] = "cnn",
    seed: int = 0,
    test: float = 0.25,
    validation: float = 0.0,
    held_out: int | float = 0,
    probe: int | float = 0,
    augment: Sequence[Any] = (),
    loss: str | Mapping[str, Any] | None = None,
    copies: Path | None = None,
) -> Task:
    """A task as a study describes it. The seed decides who owns what; the network is built later, from its own.

    Where the study names code (`my_file.py:Net`), a run that goes on takes it from its own folder: `copies`.

    >>> task = build_task("digits", clients=10, split={"dirichlet": 0.3})
    >>> len(task), int(task.train.count.sum() + task.test.count.sum())
    (10, 1797)
    """
    loss_of_samples = None if loss is None else own_loss(loss, copies)
    if split is None:
        task = _task_of_clients(data, model, loss_of_samples, seed, test, validation, held_out, probe, augment, copies)
        if clients not in (None, len(task)):
            raise ConfigError(f"task.clients is {clients}, but {task.name} gives {len(task)}; drop it")
        return task
    pool, parts = load_and_partition(data, clients, split, seed, test, validation, held_out, probe, copies)
    shape, classes = sample_shape(pool.x), pool.classes
    train = _clients_of_parts(pool, parts.train, parts.shifts, read_augmentations(augment, shape))
    official = None if parts.global_test is None else torch.from_numpy(parts.global_test)
    task = Task(
        network_builder(model, shape, classes, copies, pool.vocabulary, pool.y.ndim > 1),
        train,
        _clients_of_parts(pool, parts.test, parts.shifts),
        loss=loss_of_samples,
        name=pool.name,
        held_out=parts.held_out.tolist(),
        test_all=None if official is None else (pool.x[official], pool.y[official]),
        validation=_clients_of_parts(pool, parts.validation, parts.shifts) if validation else None,
        probe=(pool.x[parts.probe], pool.y[parts.probe]) if len(parts.probe) else None,
    )
    task.build()  # an unknown network should be refused here, not at the first round
    return task


def _task_of_clients(
    data: Any, model: Any, loss: Loss | None, seed: int, test: float, validation: float, held_out: int | float,
    probe: int | float, augment: Sequence[Any], copies: Path | None,
) -> Task:  # fmt: skip
    """A task whose clients come from a loader of one's own, each with its samples."""
    name, options = name_and_options("data", data)
    if not is_code(name):
        raise ConfigError(f"task.split is null, but {name} does not say who holds what; name a split, such as iid")
    if probe:
        raise ConfigError(f"task.probe is {probe}, but {name} gives the clients' samples; let it return a set 'probe'")
    sets = sets_from_loader(name, call_code(CodeCall(name, options), {"seed": seed}, copies))
    sets = client_sets(name, sets, seed, test, validation, held_out)
    shape, classes = sample_shape_and_classes(*(one for one in sets.values() if isinstance(one, Clients)))
    if augment:
        sets["train"] = replace(sets["train"], augment=read_augmentations(augment, shape))
    per_token = sets["train"].y.ndim > 1
    task = Task(network_builder(model, shape, classes, copies, None, per_token), loss=loss, name=name, **sets)
    task.build()
    return task


def network_builder(
    model: str | Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int,
    copies: Path | None = None,
    vocabulary: int | None = None,
    per_token: bool | None = None,
) -> Callable[[], nn.Module]:
    """What builds the network that a study names, ours or one's own; that is told the shape and the classes, where it
    takes them, and of text how many tokens there are."""
    name, options = name_and_options("model", model)
    if not is_code(name):
        offered = {"vocabulary": vocabulary, "per_token": per_token}
        return lambda: build_network(model, shape, classes, offered)
    offered = {"shape": shape, "classes": classes, "num_classes": classes}
    offered |= {} if vocabulary is None else {"vocabulary": vocabulary}
    return lambda: call_code(CodeCall(name, options), offered, copies)


def own_loss(loss: str | Mapping[str, Any], copies: Path | None = None) -> Loss:
    """The loss that a study names."""
    name, options = name_and_options("loss", loss)
    if not is_code(name):
        raise ConfigError(f"task.loss is {name!r}; name a function that gives one number per sample: my_file.py:loss")
    found = load_code(CodeCall(name, options), copies)
    return partial(found, **options) if options else found


def load_and_partition(
    data: str | Mapping[str, Any],
    clients: int | None,
    split: str | Mapping[str, Any],
    seed: int,
    test: float = 0.25,
    validation: float = 0.0,
    held_out: int | float = 0,
    probe: int | float = 0,
    copies: Path | None = None,
) -> tuple[Dataset, DatasetPartition]:
    """The dataset and who holds what of it."""
    name, options = name_and_options("data", data)
    if is_code(name):
        found = call_code(CodeCall(name, options), {"seed": seed}, copies)
        pool = dataset_from_sets(name, sets_from_loader(name, found))
    else:
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
