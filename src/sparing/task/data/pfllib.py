"""The dataset folders that PFLlib's scripts generate: train/0.npz, test/0.npz, ... and config.json."""

import json
from pathlib import Path

import torch

from sparing.core.errors import DataError
from sparing.task.data.cache import cached
from sparing.task.data.checks import Part, pool
from sparing.task.data.npz import ids, numbered_files
from sparing.task.data.places import own_folder
from sparing.task.data.registry import dataset
from sparing.task.data.safe import read_npz_object
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
        if [file.stem for file in files] != [str(i) for i in range(wanted)]:
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
    try:
        held = json.loads((root / "config.json").read_text(encoding="utf-8"))
        return int(held["num_classes"]), int(held["num_clients"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{root} has no readable config.json with num_classes and num_clients ({error}): generate it with PFLlib"
        ) from None


def read_client(file: Path) -> Part:
    held = read_npz_object(file, "data")
    if not isinstance(held, dict) or not {"x", "y"} <= set(held):
        raise DataError(f"{file} holds no dict with x and y: generate it with PFLlib")
    return Part(str(file), held["x"], held["y"])
