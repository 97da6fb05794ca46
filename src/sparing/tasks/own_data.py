"""What a loader of one's own gives back, as a dataset to share out or as clients that already have their samples.

    def load(folder="subjects"):
        return clients, tests        # each a list with one (x, y) per client; or tests one (x, y) for everybody

A dict with the names of `sparing.Task` says the same and more: train, test, test_all, validation, probe, held_out.
With `task.split` in the study, train and test are one (x, y) each, which the split shares out.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import ConfigError, DataError, nearest_name
from sparing.data.arrays import to_tensor
from sparing.data.clients import Clients, clients_from_pairs
from sparing.data.dataset import Dataset
from sparing.data.inputs import Inputs, Samples
from sparing.split.partition import draw_held_out
from sparing.split.train_test import cut_stratified, split_generator, split_train_test

_SETS = ("train", "test", "test_all", "validation", "probe", "held_out")


def sets_from_loader(reference: str, found: Any) -> dict[str, Any]:
    """What a loader returned, by the name of each set."""
    if isinstance(found, Mapping):
        for name in found:
            if name not in _SETS:
                raise DataError(f"{reference} returned {name!r}, which is no set; {nearest_name(str(name), _SETS)}")
        if "train" not in found:
            raise DataError(f"{reference} returned {', '.join(map(repr, found))} but no 'train'; add it")
        return {name: value for name, value in found.items() if value is not None}
    if isinstance(found, tuple) and len(found) == 2 and not _is_array(found[0]):
        return {"train": found[0]} if found[1] is None else {"train": found[0], "test": found[1]}
    if found is None:
        raise DataError(f"{reference} returned nothing; return (train, test), each a list of one (x, y) per client")
    return {"train": found}


def dataset_from_sets(reference: str, sets: Mapping[str, Any]) -> Dataset:
    """One pool, to be shared out by the study's split."""
    train = sets["train"]
    if isinstance(train, Dataset):
        return train
    odd = [name for name in sets if name not in ("train", "test")]
    pairs = [sets[name] for name in ("train", "test") if name in sets]
    if odd or not all(_is_pair(pair) for pair in pairs):
        what = f"{odd[0]!r}" if odd else "clients"
        raise ConfigError(
            f"{reference} returned {what}, and task.split would share out one (x, y); set task.split to null, or "
            "return (x, y), or {'train': (x, y), 'test': (x, y)}"
        )
    both = [(to_tensor(x, f"{reference}: x", pixels=True), to_tensor(y, f"{reference}: y")) for x, y in pairs]
    x, y = (torch.cat([pair[i] for pair in both]) for i in (0, 1))
    if y.is_floating_point():
        raise ConfigError(f"{reference} returned targets that are no classes, which task.split needs; set it to null")
    official = torch.arange(len(y)) >= len(both[0][1]) if len(both) > 1 else None
    return Dataset(reference, x, y, int(y.max()) + 1 if len(y) else 0, official)


def client_sets(
    reference: str, sets: Mapping[str, Any], seed: int, test: float, validation: float, held_out: int | float
) -> dict[str, Any]:
    """Arguments of `Task`; a set that the loader does not give is cut from the clients' own samples."""
    if isinstance(sets["train"], Dataset):
        raise ConfigError(f"{reference} returned one Dataset, which nobody shares out; set task.split, such as iid")
    if _is_pair(sets["train"]):
        raise ConfigError(f"{reference} returned one (x, y) and no clients; set task.split, such as iid")
    out = dict(sets)
    out["train"] = clients_from_pairs(f"{reference}: train", sets["train"])
    if "test" not in sets and test:
        out["train"], out["test"] = _cut(out["train"], test, seed, "test")
    if "validation" not in sets and validation:
        out["train"], out["validation"] = _cut(out["train"], validation, seed, "validation")
    if "held_out" not in sets:
        out["held_out"] = draw_held_out(held_out, len(out["train"]), seed).tolist()
    return out


def sample_shape(x: Samples) -> tuple[int, ...]:
    """That a network is built for: of several inputs, the first's."""
    return tuple((x.tensors[0] if isinstance(x, Inputs) else x).shape[1:])


def sample_shape_and_classes(train: Clients, *others: Any) -> tuple[tuple[int, ...], int]:
    """Of the samples that a network is built for (of several inputs, the first's); for float targets, how many numbers
    it must give."""
    y, shape = train.y, sample_shape(train.x)
    if y.is_floating_point():
        return shape, y.shape[1] if y.ndim > 1 else 1
    most = [int(one.y.max()) for one in (train, *others) if isinstance(one, Clients) and len(one.y)]
    return shape, max(most, default=0) + 1


def _cut(clients: Clients, share: float, seed: int, what: str) -> tuple[Clients, Clients]:
    """A stratified share of every client's samples taken out: what stays, and what is taken."""
    y = clients.y
    labels = y.numpy() if y.ndim == 1 and not y.is_floating_point() else np.zeros(len(y), np.int64)
    edges = zip(clients.start.tolist(), clients.count.tolist(), strict=True)
    parts = [np.arange(start, start + count) for start, count in edges]
    if what == "test":
        kept, taken = split_train_test(labels, parts, seed, share)
    else:
        kept, taken = cut_stratified(labels, parts, share, split_generator(seed, what))
    return _some(clients, kept), _some(clients, taken)


def _some(clients: Clients, parts: list[np.ndarray]) -> Clients:
    index = torch.from_numpy(np.concatenate(parts))
    count = torch.tensor([len(part) for part in parts])
    return replace(clients, x=clients.x[index], y=clients.y[index], start=count.cumsum(0) - count, count=count)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and _is_array(value[0])
