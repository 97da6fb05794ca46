"""One npz file per client."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.data.cache import cached_dataset
from sparing.data.dataset import Dataset
from sparing.data.files.locations import find_user_folder
from sparing.data.files.npy import read_npz
from sparing.data.pooling import SourcePart, natural_sort_key, pool_parts
from sparing.data.registry import register_dataset


@register_dataset("npz:PATH")
def _load_npz_clients(path: str, classes: int | None = None) -> Dataset:
    """Your own folder of npz files, one per client, each with arrays x and y

    `classes` says how many there are; without it, one more than the largest label.
    """
    root = find_user_folder("npz", path)
    return cached_dataset(f"npz-{root.name}", [root], {"classes": classes}, lambda: _read_npz_clients(root, classes))


def _read_npz_clients(root: Path, classes: int | None) -> Dataset:
    files = numbered_npz_files(root)
    parts = [SourcePart(str(file), *read_npz(file, "x", "y")) for file in files]
    x, y = pool_parts(parts, classes)
    clients = client_ids_from_counts([len(part.x) for part in parts])
    names = {"client": [file.stem for file in files]}
    return Dataset(root.name, x, y, classes or int(y.max()) + 1, None, {"client": clients}, names)


def numbered_npz_files(folder: Path) -> list[Path]:
    """The npz files of a folder, 9 before 10."""
    files = sorted(folder.glob("*.npz"), key=lambda file: natural_sort_key(file.name))
    if not files:
        raise DataError(f"{folder} holds no npz file: put one per client there, each with arrays x and y")
    return files


def client_ids_from_counts(counts: Sequence[int]) -> torch.Tensor:
    """
    >>> client_ids_from_counts([2, 1])
    tensor([0, 0, 1])
    """
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
