"""Packages whose names are imported once they are asked for, so that importing the package itself costs nothing."""

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package: `homes` says in which module each of its names is; subpackages are found too.

    >>> lazy_names("sparing", {"Task": "sparing.tasks.task"})("Task").__name__
    'Task'
    """

    def get(name: str) -> Any:
        if name in homes:
            found = getattr(importlib.import_module(homes[name]), name)
            setattr(sys.modules[package], name, found)
            return found
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
