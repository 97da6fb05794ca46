"""Names for recipes: a decorator for ours, the entry point group `sparing.recipes` for everyone else's."""

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, NamedTuple

from sparing.core.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from sparing.core.method import Recipe


class RecipeEntry(NamedTuple):
    """A named recipe: calling `make` with its options gives the Recipe."""

    name: str
    make: "Callable[..., Recipe]"
    about: str
    paper: str


REGISTRY: dict[str, RecipeEntry] = {}
RECIPE_GROUP = "sparing.recipes"
"""The entry points by which installed packages bring methods."""


def recipe(name: str, paper: str = "") -> "Callable[[Callable[..., Recipe]], Callable[..., Recipe]]":
    """Register a function from options to a Recipe; its docstring's first line is what `sparing methods` prints."""

    def register(make: "Callable[..., Recipe]") -> "Callable[..., Recipe]":
        about = (make.__doc__ or "").strip().split("\n")[0]
        REGISTRY[name] = RecipeEntry(name, make, about, paper)
        return make

    return register


def known_recipes() -> dict[str, RecipeEntry]:
    """Every recipe there is, by name: our own and those that installed packages bring."""
    _import_recipes()
    return dict(sorted(REGISTRY.items()))


@cache
def _import_recipes() -> None:
    """Once in a process."""
    package = importlib.import_module("sparing.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"sparing.recipes.{module.name}")
    for point in entry_points(group=RECIPE_GROUP):
        point.load()


def find_recipe(name: str) -> RecipeEntry:
    entries = known_recipes()
    if name not in entries:
        raise unknown_recipe(name, entries)
    return entries[name]


def unknown_recipe(name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"unknown method {name!r}; {nearest_name(name, known)}")
