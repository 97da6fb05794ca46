"""Datasets by name: a decorator registers a loader, `load` calls it."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

from sparing.core.errors import DataError, nearest
from sparing.task.dataset import Dataset

Loader = Callable[..., Dataset]


class Entry(NamedTuple):
    """A loader and how it is asked for: `usage` is its name, or `name:PATH` where it needs to be told what to read."""

    usage: str
    load: Loader
    about: str


REGISTRY: dict[str, Entry] = {}


def dataset(usage: str) -> Callable[[Loader], Loader]:
    """Register a loader; the first line of its docstring says what it is. `"npz:PATH"` gets the PATH as an argument."""

    def register(loader: Loader) -> Loader:
        about = (loader.__doc__ or "").strip().split("\n")[0]
        REGISTRY[usage.partition(":")[0]] = Entry(usage, loader, about)
        return loader

    return register


def known() -> dict[str, Entry]:
    """Every dataset there is, by name.

    >>> known()["npz"].usage
    'npz:PATH'
    """
    package = importlib.import_module("sparing.task.data")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"sparing.task.data.{module.name}")
    return dict(sorted(REGISTRY.items()))


def load(name: str, **options: Any) -> Dataset:
    """A dataset by name, decoded once and memory-mapped from then on; see docs/data.md for the names and options.

    >>> digits = load("digits")
    >>> digits.x.shape, digits.classes
    (torch.Size([1797, 1, 8, 8]), 10)
    """
    head, colon, place = name.partition(":")
    entries = known()
    if head not in entries:
        raise DataError(f"no data is called {name!r}; {nearest(head, entries)}")
    entry = entries[head]
    if (":" in entry.usage) != bool(place):
        raise DataError(f"{name!r} does not say what to load: write it as {entry.usage!r}")
    takes = list(inspect.signature(entry.load).parameters)[1 if colon else 0 :]
    for option in options:
        if option not in takes:
            hint = nearest(option, takes) if takes else "it takes none"
            raise DataError(f"data {head!r} has no option {option!r}; {hint}")
    return entry.load(place, **options) if colon else entry.load(**options)
