"""Index lists from elsewhere: one list of sample numbers per client, given outright or in a JSON or npz file."""

import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparing.core.errors import ConfigError, DataError
from sparing.data.files.npy import read_whole_npz
from sparing.data.files.unpacking import one_line, read_json
from sparing.split.dealing import ClientParts

_LIST_ROLES = ("train", "test", "validation")


def read_index_lists(given: Any, samples: int) -> dict[str, ClientParts]:
    """Checked lists by role; the role "all" where train and test were not told apart.

    `given` is a list of lists, a mapping such as {"train": [...], "test": [...]}, or the path of a JSON file with
    either. An npz file has one array per client in order, named train_0, test_0, ... where roles are told apart.

    >>> read_index_lists([[2, 0], [1]], samples=3)
    {'all': [array([0, 2]), array([1])]}
    """
    where = "the index lists"
    if isinstance(given, str | Path):
        where, given = str(given), _read_lists_file(Path(given))
    if not isinstance(given, dict):
        given = {"all": given}
    elif not {"train"} <= set(given) <= set(_LIST_ROLES):
        raise ConfigError(
            f"{where} are for {one_line(', '.join(map(str, given)))}: give train, and test or validation if known"
        )
    lists = {
        role: [_sample_numbers(where, k, one) for k, one in enumerate(_check_list_of_lists(where, each))]
        for role, each in given.items()
    }
    _check_client_counts(where, lists)
    _check_disjoint(where, lists, samples)
    return lists


def _read_lists_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"there are no index lists at {path}: give the path of a JSON or npz file")
    try:
        return _read_lists_npz(path) if path.suffix == ".npz" else read_json(path, "it is no JSON")
    except DataError as error:
        raise ConfigError(f"{path} does not hold index lists: {error}") from None


def _read_lists_npz(path: Path) -> Any:
    roles: dict[str, list[np.ndarray]] = {}
    for name, array in read_whole_npz(path).items():
        role = name.split("_")[0]
        roles.setdefault(role if role in _LIST_ROLES else "all", []).append(array)
    return roles["all"] if set(roles) == {"all"} else roles


def _check_list_of_lists(where: str, lists: Any) -> Sequence[Any]:
    if not isinstance(lists, list | tuple) or not lists:
        raise ConfigError(f"{where} must be one list of sample numbers per client, seen {_short_repr(lists)}")
    return lists


def _sample_numbers(where: str, client: int, one: Any) -> np.ndarray:
    whole = not isinstance(one, list | tuple) or all(isinstance(n, int | np.integer) for n in one)
    try:
        array = np.asarray(one if whole else [[]])
    except (ValueError, OverflowError):
        array = np.empty((0, 0))
    if array.ndim == 1 and not len(array):
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{where}: client {client} must have a list of whole numbers, seen {_short_repr(one)}")
    return np.sort(array.astype(np.int64))


def _check_client_counts(where: str, lists: dict[str, ClientParts]) -> None:
    first, *others = lists
    for role in others:
        if len(lists[role]) != len(lists[first]):
            raise ConfigError(
                f"{where} have {len(lists[first])} clients for {first} but {len(lists[role])} for {role}: "
                "give one list per client in each"
            )
    for client, one in enumerate(lists[first]):
        if not len(one):
            raise ConfigError(f"{where}: the list of client {client} is empty: give it samples or leave it out")


def _check_disjoint(where: str, lists: dict[str, ClientParts], samples: int) -> None:
    """Refuse numbers that are no sample, and samples that are listed twice."""
    parts = [part for each in lists.values() for part in each]
    everything = np.concatenate(parts)
    client = np.concatenate([np.repeat(np.arange(len(each)), [len(p) for p in each]) for each in lists.values()])
    outside = np.flatnonzero((everything < 0) | (everything >= samples))
    if len(outside):
        at = outside[0]
        raise ConfigError(
            f"{where}: client {client[at]} lists sample {everything[at]}, but samples are numbered 0 to {samples - 1}"
        )
    order = np.argsort(everything, kind="stable")
    twice = np.flatnonzero(np.diff(everything[order]) == 0)
    if len(twice):
        one, other = client[order[twice[0]]], client[order[twice[0] + 1]]
        raise ConfigError(
            f"{where} overlap: sample {everything[order[twice[0]]]} is listed by clients {one} and {other}; "
            "a sample belongs to one list of one client"
        )


def _short_repr(value: Any) -> str:
    return reprlib.repr(value)
