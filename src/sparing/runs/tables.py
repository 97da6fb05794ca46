"""Rows as people have them in a notebook."""

import importlib
from collections.abc import Sequence
from typing import Any


def frame_of(rows: Sequence[dict[str, Any]]) -> Any:
    """A pandas DataFrame where pandas is installed, else the rows themselves."""
    try:
        pandas = importlib.import_module("pandas")
    except ImportError:
        return list(rows)
    return pandas.DataFrame(list(rows))
