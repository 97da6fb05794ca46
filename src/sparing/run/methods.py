"""From the names and options in a study to recipes."""

from typing import Any

from sparing.core.protocols import Recipe
from sparing.core.registry import find
from sparing.task.options import checked, named


def recipes(method: list[Any]) -> list[Recipe]:
    """One recipe per entry; unknown names and options are refused with the nearest known one."""
    made = []
    for entry in method:
        name, options = named("method", entry)
        make = find(name).make
        made.append(make(**checked("method", name, make, options, given=0)))
    return made
