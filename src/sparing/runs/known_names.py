"""What there is by name: methods with their options, datasets, networks, parts and torch's optimisers.

`names.json` beside this file is written from the code by `python docs/reference/write.py`, so that a list, a completion
or a mistake in a name needs none of the code it speaks of, and not torch. Where that is loaded anyway, or an installed
package brings methods of its own, the code itself is asked.
"""

import importlib
import inspect
import json
import pkgutil
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from sparing.core.optimiser import Optimiser, refuse_unknown_optimiser
from sparing.core.registry import RECIPE_GROUP, RecipeEntry, known_recipes, unknown_recipe
from sparing.data.options import name_and_options, unknown_model, unknown_option
from sparing.data.registry import known_datasets, unknown_dataset

NAMES_FILE = Path(__file__).with_name("names.json")


class MethodName(NamedTuple):
    """A recipe: what it does, its options with their defaults, where it was published."""

    name: str
    about: str
    options: dict[str, Any]
    paper: str


class KnownNames(NamedTuple):
    methods: dict[str, MethodName]
    datasets: dict[str, dict[str, str]]  # usage and about, by name
    models: list[str]
    parts: dict[str, str]  # modules of sparing.parts, and what each says of itself
    optimisers: dict[str, list[str]]  # classes of torch.optim, and what each takes
    torch: str  # the version that these are of


def known_names() -> KnownNames:
    """From the table where it suffices, else from the code."""
    return _names_in_table() if _table_suffices() else names_from_code()


def _table_suffices() -> bool:
    return "torch" not in sys.modules and not entry_points(group=RECIPE_GROUP)


def _names_in_table() -> KnownNames:
    held = json.loads(NAMES_FILE.read_text(encoding="utf-8"))
    return KnownNames(**(held | {"methods": {one["name"]: MethodName(**one) for one in held["methods"]}}))


def names_from_code(ours: bool = False) -> KnownNames:
    """What is registered; `ours`: by the package itself."""
    recipes, datasets = known_recipes(), known_datasets()
    models: dict[str, Any] = importlib.import_module("sparing.models").MODELS

    def wanted(made: Any) -> bool:
        return not ours or made.__module__.startswith("sparing.")

    return KnownNames(
        {
            name: MethodName(name, one.about, recipe_options(one), one.paper)
            for name, one in recipes.items()
            if wanted(one.make)
        },
        {name: {"usage": one.usage, "about": one.about} for name, one in datasets.items() if wanted(one.load)},
        sorted(name for name, build in models.items() if wanted(build)),
        _parts_with_docs(),
        importlib.import_module("sparing.train.torch_optimisers").optimiser_settings(),
        _torch_version(),
    )


def _torch_version() -> str:
    """Of what is installed, without how it was built."""
    return version("torch").partition("+")[0]


def names_table() -> str:
    """The text of names.json."""
    names = names_from_code(ours=True)
    methods = [one._asdict() for one in names.methods.values()]
    return json.dumps(names._asdict() | {"methods": methods}, indent=1) + "\n"


def recipe_options(entry: RecipeEntry) -> dict[str, Any]:
    """The options of a recipe and their defaults."""
    parameters = inspect.signature(entry.make).parameters.values()
    return {p.name: None if p.default is p.empty else p.default for p in parameters}


def _parts_with_docs() -> dict[str, str]:
    """Every module of sparing.parts and the first sentence of what it says about itself."""
    package = importlib.import_module("sparing.parts")
    found = [m.name for m in pkgutil.walk_packages(package.__path__, "sparing.parts.") if not m.ispkg]
    modules = [importlib.import_module(name) for name in sorted(found, key=lambda name: name.rpartition(".")[2])]
    return {m.__name__.rpartition(".")[2]: _first_sentence(m.__doc__ or "") for m in modules}


def _first_sentence(text: str) -> str:
    """
    >>> _first_sentence("Masks: what\\ntravels. And more.")
    'Masks: what travels.'
    """
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".") + "."


def refuse_unknown_methods(entries: list[tuple[str, dict[str, Any]]]) -> None:
    """Names and options of recipes that do not exist, before any recipe is imported; else each says so itself."""
    if not _table_suffices():
        return
    methods = _names_in_table().methods
    for name, options in entries:
        if name not in methods:
            raise unknown_recipe(name, methods)
        for key in options:
            if key not in methods[name].options:
                raise unknown_option("method", name, key, methods[name].options)


def refuse_unknown_task(data: Any, model: Any) -> None:
    """The same of a study's dataset and network. A name with a colon says itself where it is found."""
    if not _table_suffices():
        return
    names = _names_in_table()
    for what, entry, known in (("data", data, names.datasets), ("model", model, names.models)):
        name = "" if entry is None else name_and_options(what, entry)[0]
        if name and ":" not in name and name not in known:
            raise unknown_dataset(name, known) if what == "data" else unknown_model(name, known)


def refuse_misspelt_optimiser(optimiser: Optimiser, where: str) -> None:
    """The same of an optimiser, where the table is of the torch that is installed; else torch itself is asked later."""
    if _table_suffices() and (names := _names_in_table()).torch == _torch_version():
        refuse_unknown_optimiser(optimiser, names.optimisers, where)
