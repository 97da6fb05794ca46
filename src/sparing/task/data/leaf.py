"""LEAF's json files, and FEMNIST in them: handwritten characters by writer."""

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.task.data.cache import stored
from sparing.task.data.checks import Part, natural, numbered, numbers, pool
from sparing.task.data.places import Form
from sparing.task.data.registry import dataset
from sparing.task.data.unpacking import brief, read_json, reading
from sparing.task.dataset import Dataset

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
FETCH = (
    "git clone https://github.com/TalwalkarLab/leaf && (cd leaf/data/{name} && ./preprocess.sh -s niid --sf 1.0 -k 0 "
    "-t sample) && mkdir -p {{folder}} && mv leaf/data/{name}/data/train leaf/data/{name}/data/test {{folder}}"
)


class User(NamedTuple):
    """One user's samples in one file."""

    name: str
    x: list[Any]
    y: list[Any]
    test: bool
    where: str


def leaf_forms(name: str, read: Any) -> list[Form]:
    """LEAF's folders `train` and `test` with any number of json files each."""
    return [Form(("train", "test"), (name, f"{name}/data", f"leaf/data/{name}/data"), read)]


def users(folders: list[Path]) -> Iterator[User]:
    """Everyone in LEAF's json files, file by file."""
    for folder in folders:
        files = sorted(folder.glob("*.json"), key=lambda path: natural(path.name))
        if not files:
            raise DataError(f"{folder} holds no json file of LEAF")
        for file in files:
            for name, x, y in read_users(file):
                where = f"{file}, user {brief(name)},"
                if not isinstance(x, list) or not isinstance(y, list):
                    raise DataError(f"{where} has no lists x and y")
                if len(x) != len(y):
                    raise DataError(f"{where} has {len(x)} samples but {len(y)} labels: each needs one")
                if x:
                    yield User(name, x, y, folder.name == "test", where)


def read_users(file: Path) -> list[tuple[str, Any, Any]]:
    problem = f"{file} is cut short or no json file of LEAF"
    held = read_json(file, problem)
    with reading(problem):
        names = held["users"]
        if not isinstance(names, list) or len(set(names)) < len(names):
            raise ValueError("its users are no list of different names")
        return [(str(name), held["user_data"][name]["x"], held["user_data"][name]["y"]) for name in names]


@dataset("femnist")
def femnist() -> Dataset:
    """Handwritten digits and letters by writer, 62 classes, 28x28, dark on white, in LEAF's json files"""
    return stored("femnist", leaf_forms("femnist", read_femnist), FETCH.format(name="femnist"))


def read_femnist(paths: list[Path]) -> Dataset:
    parts, writers, official = [], [], []
    for user in users(paths):
        parts.append(Part(user.where, characters(user), numbers(user.y, f"{user.where} has labels")))
        writers += [user.name] * len(user.y)
        official += [user.test] * len(user.y)
    if not parts:
        raise DataError(f"{paths[0]} holds no samples")
    x, y = pool(parts, len(CHARACTERS))
    ids, names = numbered(writers)
    meaning = {"class": [*CHARACTERS], "writer": names}
    return Dataset("femnist", x, y, len(CHARACTERS), torch.tensor(official), {"writer": ids}, meaning)


def characters(user: User) -> np.ndarray:
    """LEAF writes a character as 784 numbers in [0, 1]."""
    with reading(f"{user.where} has images of mixed shapes: each must be 784 numbers"):
        x = np.asarray(user.x, np.float32)
    if x.ndim != 2 or x.shape[1] != 784 or not 0 <= x.min() <= x.max() <= 1:
        raise DataError(f"{user.where} has samples of shape {x.shape[1:]}: each must be 784 numbers between 0 and 1")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28)
