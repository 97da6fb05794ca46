"""LEAF's json files, and FEMNIST in them: handwritten characters by writer."""

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.data.cache import load_stored
from sparing.data.dataset import Dataset
from sparing.data.files.locations import FileForm
from sparing.data.files.unpacking import damage_as_data_error, one_line, read_json
from sparing.data.pooling import SourcePart, natural_sort_key, number_keys, pool_parts, to_number_array
from sparing.data.registry import register_dataset

_FEMNIST_CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase
LEAF_FETCH = (
    "git clone https://github.com/TalwalkarLab/leaf && (cd leaf/data/{name} && ./preprocess.sh -s niid --sf 1.0 -k 0 "
    "-t sample) && mkdir -p {{folder}} && mv leaf/data/{name}/data/train leaf/data/{name}/data/test {{folder}}"
)


class _LeafUser(NamedTuple):
    """One user's samples in one file."""

    name: str
    x: list[Any]
    y: list[Any]
    test: bool
    where: str


def leaf_forms(name: str, read: Any) -> list[FileForm]:
    """LEAF's folders `train` and `test` with any number of json files each."""
    return [FileForm(("train", "test"), (name, f"{name}/data", f"leaf/data/{name}/data"), read)]


def read_leaf_users(folders: list[Path]) -> Iterator[_LeafUser]:
    """Everyone in LEAF's json files, file by file."""
    for folder in folders:
        files = sorted(folder.glob("*.json"), key=lambda path: natural_sort_key(path.name))
        if not files:
            raise DataError(f"{folder} holds no json file of LEAF")
        for file in files:
            for name, x, y in _read_leaf_file(file):
                where = f"{file}, user {one_line(name)},"
                if not isinstance(x, list) or not isinstance(y, list):
                    raise DataError(f"{where} has no lists x and y")
                if len(x) != len(y):
                    raise DataError(f"{where} has {len(x)} samples but {len(y)} labels: each needs one")
                if x:
                    yield _LeafUser(name, x, y, folder.name == "test", where)


def _read_leaf_file(file: Path) -> list[tuple[str, Any, Any]]:
    problem = f"{file} is cut short or no json file of LEAF"
    held = read_json(file, problem)
    with damage_as_data_error(problem):
        names = held["users"]
        if not isinstance(names, list) or len(set(names)) < len(names):
            raise ValueError("its users are no list of different names")
        return [(str(name), held["user_data"][name]["x"], held["user_data"][name]["y"]) for name in names]


@register_dataset("femnist")
def _load_femnist() -> Dataset:
    """Handwritten digits and letters by writer, 62 classes, 28x28, dark on white, in LEAF's json files"""
    return load_stored("femnist", leaf_forms("femnist", _read_femnist), LEAF_FETCH.format(name="femnist"))


def _read_femnist(paths: list[Path]) -> Dataset:
    parts, writers, official = [], [], []
    for user in read_leaf_users(paths):
        parts.append(
            SourcePart(user.where, _character_images(user), to_number_array(user.y, f"{user.where} has labels"))
        )
        writers += [user.name] * len(user.y)
        official += [user.test] * len(user.y)
    if not parts:
        raise DataError(f"{paths[0]} holds no samples")
    x, y = pool_parts(parts, len(_FEMNIST_CLASSES))
    ids, names = number_keys(writers)
    meaning = {"class": [*_FEMNIST_CLASSES], "writer": names}
    return Dataset("femnist", x, y, len(_FEMNIST_CLASSES), torch.tensor(official), {"writer": ids}, meaning)


def _character_images(user: _LeafUser) -> np.ndarray:
    """LEAF writes a character as 784 numbers in [0, 1]."""
    with damage_as_data_error(f"{user.where} has images of mixed shapes: each must be 784 numbers"):
        x = np.asarray(user.x, np.float32)
    if x.ndim != 2 or x.shape[1] != 784 or not 0 <= x.min() <= x.max() <= 1:
        raise DataError(f"{user.where} has samples of shape {x.shape[1:]}: each must be 784 numbers between 0 and 1")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28)
