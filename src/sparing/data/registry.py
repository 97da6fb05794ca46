"""Datasets by name: a decorator registers a loader, `load_dataset` calls it."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sparing.core.errors import DataError, nearest_name

if TYPE_CHECKING:
    from sparing.data.dataset import Dataset

DatasetLoader = Callable[..., "Dataset"]


class DatasetEntry(NamedTuple):
    """A loader and how it is asked for: `usage` is its name, or `name:PATH` where it needs to be told what to read."""

    usage: str
    load: DatasetLoader
    about: str


_DATASETS: dict[str, DatasetEntry] = {}


def register_dataset(usage: str) -> Callable[[DatasetLoader], DatasetLoader]:
    """Register a loader; the first line of its docstring says what it is. `"npz:PATH"` gets the PATH as an argument."""

    def register(loader: DatasetLoader) -> DatasetLoader:
        about = (loader.__doc__ or "").strip().split("\n")[0]
        _DATASETS[usage.partition(":")[0]] = DatasetEntry(usage, loader, about)
        return loader

    return register


def known_datasets() -> dict[str, DatasetEntry]:
    """Every dataset there is, by name.

    >>> known_datasets()["npz"].usage
    'npz:PATH'
    """
    package = importlib.import_module("sparing.data.sets")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"sparing.data.sets.{module.name}")
    return dict(sorted(_DATASETS.items()))


def load_dataset(name: str, **options: Any) -> "Dataset":
    """A dataset by name, decoded once and memory-mapped from then on; see docs/data.md for the names and options.

    >>> digits = load_dataset("digits")
    >>> digits.x.shape, digits.classes
    (torch.Size([1797, 1, 8, 8]), 10)
    """
    head, colon, place = name.partition(":")
    entries = known_datasets()
    if head not in entries:
        raise unknown_dataset(name, entries)
    entry = entries[head]
    if (":" in entry.usage) != bool(place):
        raise DataError(f"{name!r} does not say what to load: write it as {entry.usage!r}")
    takes = list(inspect.signature(entry.load).parameters)[1 if colon else 0 :]
    for option in options:
        if option not in takes:
            hint = nearest_name(option, takes) if takes else "it takes none"
            raise DataError(f"data {head!r} has no option {option!r}; {hint}")
    return entry.load(place, **options) if colon else entry.load(**options)


def unknown_dataset(name: str, known: Iterable[str]) -> DataError:
    return DataError(f"no data is called {name!r}; {nearest_name(name.partition(':')[0], known)}")
