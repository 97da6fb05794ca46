"""Which recipes cannot go together: the same ones as tests/refusals.json says, each refused in a sentence with a fix.

The file has the recipes, from which all ordered pairs are made; those of which triples are made; and what was refused,
by sentence. Where a combination is refused or allowed on purpose from now on, or a recipe has joined those there:

    python tests/test_refusals.py        writes what is refused anew
"""

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sparing.core.compose import compose, remake_model
from sparing.core.errors import SparingError
from sparing.core.method import Recipe
from sparing.core.tree import layout_of
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import method_list

FILE = Path(__file__).with_name("refusals.json")
KNOWN = json.loads(FILE.read_text())
WITHOUT_A_FIX = ("would factor nothing", "StopIteration")
"""Nothing is left to compress, beside `local` or where models become too small: no fix is named yet."""


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))


def name_of(entry: Any) -> str:
    return entry if isinstance(entry, str) else next(iter(entry))


ENTRIES = {name_of(entry): entry for entry in KNOWN["recipes"]}


def combinations() -> Iterator[tuple[str, ...]]:
    yield from itertools.permutations(ENTRIES, 2)
    around = set(KNOWN["around"])
    yield from (names for names in itertools.permutations(KNOWN["middle"] + KNOWN["around"], 3) if set(names) - around)


@cache
def recipe_of(name: str) -> Recipe:
    return recipes_from_entries(method_list([ENTRIES[name]]))[0]


@cache
def layout_for(names: tuple[str, ...]):
    return layout_of(remake_model(network(), [recipe_of(name) for name in names]))


def refusal(names: tuple[str, ...]) -> str:
    """The sentence in which these are refused; empty if they are not."""
    remaking = tuple(name for name in names if name in ("split-mix", "lora"))
    try:
        compose(layout_for(remaking), *map(recipe_of, names))
    except (SparingError, StopIteration) as error:
        return str(error) or type(error).__name__
    return ""


@pytest.mark.parametrize("first", ENTRIES)
def test_the_same_combinations_are_refused_each_with_a_fix(first):
    found = {"+".join(names): refusal(names) for names in combinations() if names[0] == first}
    wanted = {one for some in KNOWN["refused"].values() for one in some if one.split("+")[0] == first}
    refused = {one for one, sentence in found.items() if sentence}
    assert refused == wanted, f"if that is on purpose: {__doc__}"
    for one in refused:
        assert "; " in found[one] or any(words in found[one] for words in WITHOUT_A_FIX), f"{one}: {found[one]}"


def write() -> None:
    by_sentence: dict[str, list[str]] = {}
    for names in combinations():
        if sentence := refusal(names):
            by_sentence.setdefault(sentence, []).append("+".join(names))
    lines = [f"  {json.dumps(key)}: {json.dumps(KNOWN[key])},\n" for key in ("recipes", "middle", "around")]
    told = [f"    {json.dumps(sentence)}: {json.dumps(some)}" for sentence, some in sorted(by_sentence.items())]
    FILE.write_text("{\n" + "".join(lines) + '  "refused": {\n' + ",\n".join(told) + "\n  }\n}\n")


if __name__ == "__main__":
    write()
