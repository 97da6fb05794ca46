"""The dataset folders that PFLlib's scripts generate: train/0.npz, test/0.npz, ... and config.json."""

from pathlib import Path

import torch

from sparing.core.errors import DataError
from sparing.data.cache import cached_dataset
from sparing.data.dataset import Dataset
from sparing.data.files.locations import find_user_folder
from sparing.data.files.npy import read_npz_object
from sparing.data.files.unpacking import damage_as_data_error, read_json
from sparing.data.pooling import SourcePart, pool_parts, to_number_array
from sparing.data.registry import register_dataset
from sparing.data.sets.npz_clients import client_ids_from_counts, numbered_npz_files


@register_dataset("pfllib:PATH")
def _load_pfllib(path: str) -> Dataset:
    """A dataset folder that PFLlib generated: its clients, its train and test samples"""
    root = find_user_folder("pfllib", path)
    return cached_dataset(f"pfllib-{root.name}", [root], {}, lambda: _read_pfllib(root))


def _read_pfllib(root: Path) -> Dataset:
    classes, wanted = _read_pfllib_counts(root)
    parts, clients, official = [], [], []
    for half in ("train", "test"):
        files = numbered_npz_files(root / half)
        if len(files) != wanted or [file.stem for file in files] != [str(i) for i in range(wanted)]:
            raise DataError(
                f"{root / half} holds {len(files)} npz files but config.json says {wanted} clients, 0.npz on"
            )
        own = [_read_pfllib_client(file) for file in files]
        clients.append(client_ids_from_counts([len(part.x) for part in own]))
        official += [half == "test"] * len(clients[-1])
        parts += own
    names = {"client": [str(i) for i in range(wanted)]}
    groups = {"client": torch.cat(clients)}
    return Dataset(root.name, *pool_parts(parts, classes), classes, torch.tensor(official), groups, names)


def _read_pfllib_counts(root: Path) -> tuple[int, int]:
    """How many classes and clients there are."""
    problem = f"{root} has no readable config.json with num_classes and num_clients: generate it with PFLlib"
    held = read_json(root / "config.json", problem)
    with damage_as_data_error(problem):
        return int(held["num_classes"]), int(held["num_clients"])


def _read_pfllib_client(file: Path) -> SourcePart:
    held = read_npz_object(file, "data")
    if not isinstance(held, dict) or not {"x", "y"} <= set(held):
        raise DataError(f"{file} holds no dict with x and y: generate it with PFLlib")
    x = to_number_array(held["x"], f"{file} has x")
    if not x.ndim:
        raise DataError(f"{file} has x of shape (): generate it with PFLlib")
    return SourcePart(str(file), x, held["y"])
