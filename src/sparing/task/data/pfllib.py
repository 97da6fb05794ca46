"""The dataset folders that PFLlib's scripts generate: train/0.npz, test/0.npz, ... and config.json."""

from pathlib import Path

import torch

from sparing.core.errors import DataError
from sparing.task.data.cache import cached
from sparing.task.data.checks import Part, numbers, pool
from sparing.task.data.npy import read_npz_object
from sparing.task.data.npz import ids, numbered_files
from sparing.task.data.places import own_folder
from sparing.task.data.registry import dataset
from sparing.task.data.unpacking import read_json, reading
from sparing.task.dataset import Dataset


@dataset("pfllib:PATH")
def pfllib(path: str) -> Dataset:
    """A dataset folder that PFLlib generated: its clients, its train and test samples"""
    root = own_folder("pfllib", path)
    return cached(f"pfllib-{root.name}", [root], {}, lambda: read_pfllib(root))


def read_pfllib(root: Path) -> Dataset:
    classes, wanted = config(root)
    parts, clients, official = [], [], []
    for half in ("train", "test"):
        files = numbered_files(root / half)
        if len(files) != wanted or [file.stem for file in files] != [str(i) for i in range(wanted)]:
            raise DataError(
                f"{root / half} holds {len(files)} npz files but config.json says {wanted} clients, 0.npz on"
            )
        own = [read_client(file) for file in files]
        clients.append(ids([len(part.x) for part in own]))
        official += [half == "test"] * len(clients[-1])
        parts += own
    names = {"client": [str(i) for i in range(wanted)]}
    groups = {"client": torch.cat(clients)}
    return Dataset(root.name, *pool(parts, classes), classes, torch.tensor(official), groups, names)


def config(root: Path) -> tuple[int, int]:
    """How many classes and clients there are."""
    problem = f"{root} has no readable config.json with num_classes and num_clients: generate it with PFLlib"
    held = read_json(root / "config.json", problem)
    with reading(problem):
        return int(held["num_classes"]), int(held["num_clients"])


def read_client(file: Path) -> Part:
    held = read_npz_object(file, "data")
    if not isinstance(held, dict) or not {"x", "y"} <= set(held):
        raise DataError(f"{file} holds no dict with x and y: generate it with PFLlib")
    x = numbers(held["x"], f"{file} has x")
    if not x.ndim:
        raise DataError(f"{file} has x of shape (): generate it with PFLlib")
    return Part(str(file), x, held["y"])
