"""The samples that a node or a server holds itself, from where people keep them.

client-3.npz             arrays x and y, and if there are any x_test and y_test
DATASET/train/3.npz      as PFLlib writes them; test/3.npz beside it is the client's test set
femnist#f0001_41         of a dataset by name, the samples of one of its natural clients (LEAF's users, a folder's
                         domains, ...)
my_file.py:load          a function that returns (x, y), or ((x, y), (x_test, y_test))
"""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import ConfigError, DataError, nearest_name
from sparing.data import load_dataset
from sparing.data.arrays import to_tensor
from sparing.data.files.npy import read_npz_object, read_whole_npz
from sparing.data.files.unpacking import damage_as_data_error
from sparing.data.inputs import Inputs
from sparing.net.node import Holding
from sparing.net.server import ServerSets
from sparing.tasks.code import CodeCall, call_code, code_file, is_code, place_beside
from sparing.tasks.trust import trust


def load_holding(place: str) -> Holding:
    """One client's samples."""
    found = _read_holding(place)
    for what, pair in (("training", found.train), ("test", found.test)):
        if pair is not None and len(pair[1]) == 0:
            raise DataError(f"{place} has no {what} samples; give it some")
        if pair is not None and isinstance(pair[0], np.ndarray | Tensor) and len(pair[0]) != len(pair[1]):
            raise DataError(f"{place} has {len(pair[0])} {what} samples and {len(pair[1])} labels; give one each")
    return found


def _read_holding(place: str) -> Holding:
    if is_code(place):
        return _from_function(place)
    if "#" in place and not Path(place).exists():
        return _natural_client(*place.rsplit("#", 1))
    path = Path(place)
    if not path.is_file():
        raise DataError(f"there is no file {place}; give an npz file, NAME#CLIENT of a dataset, or my_file.py:load")
    if path.parent.name == "train" and "x" not in _array_names(path):
        other = path.parent.parent / "test" / path.name
        return Holding(_pfllib_pair(path), _pfllib_pair(other) if other.is_file() else None)
    arrays = read_whole_npz(path)
    return Holding(_pair(arrays, "x", "y", place), _pair(arrays, "x_test", "y_test", place, lacking=True))


def load_holdings(places: Sequence[str]) -> dict[int | None, Holding]:
    """`PLACE` for the only client of a node, or `CLIENT=PLACE` for each of several."""
    found: dict[int | None, Holding] = {}
    for place in places:
        client, equals, rest = place.partition("=")
        numbered = bool(equals) and client.isdecimal()
        if not numbered and len(places) > 1:
            raise ConfigError(f"--data {place} does not say which client it is; write 3={place} for client 3")
        key = int(client) if numbered else None
        if key in found:
            raise ConfigError(f"--data names client {key} twice; keep one")
        found[key] = load_holding(rest if numbered else place)
    if not found:
        raise ConfigError("a node needs samples; give --data, such as --data client-0.npz")
    return found


def load_server_sets(place: Path | None, shape: tuple[int, ...] | None, classes: int | None) -> ServerSets:
    """From an npz file with arrays x and y, and perhaps x_probe and y_probe; or from what was typed."""
    if place is None:
        if shape is None or classes is None:
            raise ConfigError("the server holds no samples; give --test test.npz, or --shape 1x8x8 --classes 10")
        return ServerSets(shape, classes)
    if not place.is_file():
        raise DataError(f"there is no file {place}; give an npz file with arrays x and y")
    arrays = read_whole_npz(place)
    test = _pair(arrays, "x", "y", str(place))
    assert test is not None
    told = int(arrays["classes"]) if "classes" in arrays and arrays["classes"].size == 1 else None
    labels = np.asarray(test[1])
    counted = int(labels.max()) + 1 if labels.dtype.kind in "iu" and labels.ndim == 1 else 1
    return ServerSets(
        shape or tuple(test[0].shape[1:]),
        classes or told or counted,
        test,
        _pair(arrays, "x_probe", "y_probe", str(place), lacking=True),
    )


def write_holdings(folder: Path, task: Any, classes: int) -> list[Path]:
    """Every client's samples and the server's test set as files, to try a federation with data from one place."""
    if isinstance(task.train.x, Inputs):
        raise ConfigError(
            f"{task.name} has samples of several tensors, and files for nodes hold one array x: let each node name a "
            "function of its own, --data my_file.py:load"
        )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(len(task)):
        x, y = task.train.client(i)
        arrays = {"x": x.numpy(), "y": y.numpy()}
        if task.test is not None and int(task.test.count[i]):
            x, y = task.test.client(i)
            arrays |= {"x_test": x.numpy(), "y_test": y.numpy()}
        paths.append(folder / f"client-{i}.npz")
        np.savez(paths[-1], **arrays)
    if task.test_all is not None:
        x, y = task.test_all
        paths.append(folder / "server.npz")
        np.savez(paths[-1], x=x.numpy(), y=y.numpy(), classes=np.array(classes))
    return paths


def _array_names(path: Path) -> list[str]:
    with damage_as_data_error(f"{path} is no npz file"), zipfile.ZipFile(path) as archive:
        return [name.removesuffix(".npy") for name in archive.namelist()]


def _pair(arrays: dict[str, np.ndarray], x: str, y: str, where: str, lacking: bool = False) -> Any:
    if x not in arrays and y not in arrays and lacking:
        return None
    for name in (x, y):
        if name not in arrays:
            raise DataError(f"{where} has no array {name!r} (it has {', '.join(arrays)}); a client needs x and y")
    return to_tensor(arrays[x], f"{where}: {x}", pixels=True), to_tensor(arrays[y], f"{where}: {y}")


def _pfllib_pair(path: Path) -> Any:
    held = read_npz_object(path, "data")
    if not isinstance(held, dict) or not {"x", "y"} <= set(held):
        raise DataError(f"{path} holds no dict with x and y: generate it with PFLlib")
    return to_tensor(np.asarray(held["x"]), f"{path}: x", pixels=True), to_tensor(np.asarray(held["y"]), f"{path}: y")


def _natural_client(name: str, client: str) -> Holding:
    pool = load_dataset(name)
    for group, ids in pool.groups.items():
        known = [str(one) for one in pool.names.get(group, range(int(ids.max()) + 1))]
        if client in known:
            mine = ids == known.index(client)
            official = torch.zeros_like(mine) if pool.official is None else pool.official
            train, test = mine & ~official, mine & official
            return Holding((pool.x[train], pool.y[train]), (pool.x[test], pool.y[test]) if bool(test.any()) else None)
    known = [str(one) for names in pool.names.values() for one in names]
    raise DataError(f"{name} has no client called {client!r}; {nearest_name(client, known[:1000] or ['none'])}")


def trusted_call(reference: str) -> CodeCall:
    """Code that the owner of this machine has typed: that is trust enough."""
    call = CodeCall(place_beside(reference, (Path(),)))
    file = code_file(call)
    trust(file.sha256, file.path)
    return call


def _from_function(reference: str) -> Holding:
    found = call_code(trusted_call(reference), {})
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise DataError(f"{reference} returned a {type(found).__name__}; return (x, y), or ((x, y), (x_test, y_test))")
    if isinstance(found[0], tuple | list) and len(found[0]) == 2:
        return Holding(tuple(found[0]), tuple(found[1]) if found[1] is not None else None)
    return Holding(tuple(found))
