"""One npz file per client."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.task.data.cache import cached
from sparing.task.data.checks import Part, natural, pool
from sparing.task.data.npy import read_npz
from sparing.task.data.places import own_folder
from sparing.task.data.registry import dataset
from sparing.task.dataset import Dataset


@dataset("npz:PATH")
def npz(path: str, classes: int | None = None) -> Dataset:
    """Your own folder of npz files, one per client, each with arrays x and y

    `classes` says how many there are; without it, one more than the largest label.
    """
    root = own_folder("npz", path)
    return cached(f"npz-{root.name}", [root], {"classes": classes}, lambda: read_clients(root, classes))


def read_clients(root: Path, classes: int | None) -> Dataset:
    files = numbered_files(root)
    parts = [Part(str(file), *read_npz(file, "x", "y")) for file in files]
    x, y = pool(parts, classes)
    clients = ids([len(part.x) for part in parts])
    names = {"client": [file.stem for file in files]}
    return Dataset(root.name, x, y, classes or int(y.max()) + 1, None, {"client": clients}, names)


def numbered_files(folder: Path) -> list[Path]:
    """The npz files of a folder, 9 before 10."""
    files = sorted(folder.glob("*.npz"), key=lambda file: natural(file.name))
    if not files:
        raise DataError(f"{folder} holds no npz file: put one per client there, each with arrays x and y")
    return files


def ids(counts: Sequence[int]) -> torch.Tensor:
    """
    >>> ids([2, 1])
    tensor([0, 0, 1])
    """
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
