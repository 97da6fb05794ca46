"""From the names and options in a study to recipes."""

from typing import TYPE_CHECKING, Any

from sparing.core.errors import ConfigError
from sparing.core.registry import find_recipe
from sparing.data.options import name_and_options, validate_options
from sparing.runs.known_names import refuse_unknown_methods
from sparing.runs.study import method_list

if TYPE_CHECKING:
    from sparing.core.method import Recipe

_PERSONAL_RECIPES = ("personal", "pfedsim", "fedper", "lg-fedavg", "fedrep", "fedbabu")
"""Recipes with options `layers` and `shared`, which the study's `personalization` fills in."""
_INNER_RECIPES_OPTION = "by"
"""The option of `broadcast` that is a list of recipes itself."""


def recipes_from_entries(method: list[Any], layers: dict[str, list[str]] | None = None) -> "list[Recipe]":
    """One recipe per entry; unknown names and options are refused with the nearest known one.

    `layers` are the options of the entries that keep some layers at home.
    """
    entries = [name_and_options("method", entry) for entry in method]
    refuse_unknown_methods(entries)
    names = [name for name, _ in entries]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ConfigError(f"method names {twice!r} twice; keep one")
    if layers and not any(name in _PERSONAL_RECIPES for name, _ in entries):
        names = " + ".join(name for name, _ in entries)
        raise ConfigError(
            f"personalization names layers, but nothing in {names} keeps layers personal; add personal or pfedsim"
        )
    made = []
    for name, options in entries:
        if layers and name in _PERSONAL_RECIPES:
            for key in ("layers", "shared"):
                if key in options:
                    raise ConfigError(f"{name}.{key} and personalization both name layers; keep one of them")
            options = options | layers
        if name == "broadcast" and _INNER_RECIPES_OPTION in options:
            options = options | {
                _INNER_RECIPES_OPTION: recipes_from_entries(method_list(options[_INNER_RECIPES_OPTION]))
            }
        make = find_recipe(name).make
        made.append(make(**validate_options("method", name, make, options, given=0)))
    return made
