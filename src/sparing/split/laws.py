"""A split as a study writes it: the name of a law, and its options."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from sparing.core.errors import ConfigError, nearest_name
from sparing.data.dataset import Dataset
from sparing.split.classes import pathological_split
from sparing.split.dealing import ClientParts
from sparing.split.labels import dirichlet_split, iid_split
from sparing.split.natural_ids import choose_natural_ids
from sparing.split.sizes import label_quantity_split, quantity_split
from sparing.split.styles import client_styles

SPLIT_LAWS: dict[str, Callable[..., ClientParts]] = {
    "iid": iid_split,
    "dirichlet": dirichlet_split,
    "pathological": pathological_split,
    "quantity": quantity_split,
    "label-quantity": label_quantity_split,
}
_NATURAL_GROUPS = ("client", "domain", "role", "subject", "superclass", "writer")
_NOT_IN_STUDIES = ("labels", "ids", "clients", "seed", "what")  # options that a study does not write


def read_split(split: str | Mapping[str, Any], dataset: Dataset) -> tuple[str, dict[str, Any]]:
    """The law's name and its options, checked against what the law takes."""
    if isinstance(split, str):
        split = {split: None}
    if not isinstance(split, Mapping) or len(split) != 1:
        raise ConfigError(f'no split is called {split!r}: write one, such as "iid" or {{"dirichlet": 0.3}}')
    (name, value), known = next(iter(split.items())), [*SPLIT_LAWS, "styles", "lists", *dataset.groups]
    if name not in known:
        if name in _NATURAL_GROUPS:
            has = ", ".join(sorted(dataset.groups)) or "none"
            raise ConfigError(f"{dataset.name} has no {name} ids to split by; natural ids it has: {has}")
        raise ConfigError(f"no split is called {name!r}: {nearest_name(str(name), known)}")
    if name == "lists":
        if value is None:
            raise ConfigError("lists needs index lists: write {lists: PATH} or one list per client")
        return name, {"lists": value}
    law = SPLIT_LAWS.get(name, client_styles if name == "styles" else choose_natural_ids)
    takes = {key: one for key, one in inspect.signature(law).parameters.items() if key not in _NOT_IN_STUDIES}
    if value is None:
        value = {}
    options = dict(value) if isinstance(value, Mapping) else {next(iter(takes), str(value)): value}
    for key, one in options.items():
        if key not in takes:
            what = f"known: {', '.join(takes)}" if takes else "it takes none"
            raise ConfigError(f"{name} has no option {key!r}; {what}")
        _check_option_kind(f"{name}: {key}", one, takes[key].annotation)
    for key, one in takes.items():
        if one.default is one.empty and key not in options:
            raise ConfigError(f"{name} needs {key}: write {{{name}: {{{key}: ...}}}}")
    return name, options


def _check_option_kind(what: str, value: Any, wanted: Any) -> None:
    """Whole numbers, numbers and words where the law has such."""
    kinds = {int: ("a whole number", (int,)), float: ("a number", (int, float)), str: ("a word", (str,))}
    name, allowed = kinds.get(wanted, ("a list of words", (str, list, tuple)))
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ConfigError(f"{what} must be {name}, seen {value!r}")


def split_in_words(name: str, options: dict[str, Any]) -> str:
    """The law and its options for a title.

    >>> split_in_words("dirichlet", {"alpha": 0.1, "least": 10})
    'dirichlet (alpha = 0.1, least = 10)'
    """
    if name == "lists":
        return "lists"
    words = [
        f"{key} = {one:g}" if isinstance(one, int | float) else one if isinstance(one, str) else ", ".join(one)
        for key, one in options.items()
    ]
    return f"{name} ({', '.join(words)})" if words else name
