"""From the names and options in a study to recipes."""

from typing import Any

from sparing.core.errors import ConfigError
from sparing.core.method import Recipe
from sparing.core.registry import find
from sparing.run.config import method_list
from sparing.task.options import checked, named

PERSONAL = ("personal", "pfedsim", "fedper", "lg-fedavg", "fedrep", "fedbabu")
"""Recipes with options `layers` and `shared`, which the study's `personalization` fills in."""
BY = "by"
"""The option of `broadcast` that is a list of recipes itself."""


def recipes(method: list[Any], layers: dict[str, list[str]] | None = None) -> list[Recipe]:
    """One recipe per entry; unknown names and options are refused with the nearest known one.

    `layers` are the options of the entries that keep some layers at home.
    """
    entries = [named("method", entry) for entry in method]
    names = [name for name, _ in entries]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise ConfigError(f"method names {twice!r} twice; keep one")
    if layers and not any(name in PERSONAL for name, _ in entries):
        names = " + ".join(name for name, _ in entries)
        raise ConfigError(
            f"personalization names layers, but nothing in {names} keeps layers personal; add personal or pfedsim"
        )
    made = []
    for name, options in entries:
        if layers and name in PERSONAL:
            for key in ("layers", "shared"):
                if key in options:
                    raise ConfigError(f"{name}.{key} and personalization both name layers; keep one of them")
            options = options | layers
        if name == "broadcast" and BY in options:
            options = options | {BY: recipes(method_list(options[BY]))}
        make = find(name).make
        made.append(make(**checked("method", name, make, options, given=0)))
    return made
