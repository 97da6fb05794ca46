"""From the names and options in a study to recipes."""

import inspect
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparing.core.errors import ConfigError, nearest
from sparing.core.protocols import Recipe
from sparing.core.registry import find
from sparing.run.config import named


def recipes(method: list[Any]) -> list[Recipe]:
    """One recipe per entry; unknown names and options are refused with the nearest known one."""
    made = []
    for entry in method:
        name, options = named(entry)
        make = find(name).make
        made.append(make(**checked(name, make, options)))
    return made


def checked(name: str, make: Any, options: dict[str, Any]) -> dict[str, Any]:
    parameters, hints = inspect.signature(make).parameters, get_type_hints(make)
    missing = [p.name for p in parameters.values() if p.default is p.empty and p.name not in options]
    if missing:
        raise ConfigError(f"method {name!r} needs the option {missing[0]!r}; write {{{name}: {{{missing[0]}: ...}}}}")
    out = {}
    for key, value in options.items():
        if key not in parameters:
            hint = nearest(key, parameters) if parameters else "it takes none"
            raise ConfigError(f"method {name!r} has no option {key!r}; {hint}")
        try:
            out[key] = TypeAdapter(hints[key], config=ConfigDict(strict=False)).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].lower()
            raise ConfigError(f"{name}.{key} is {value!r}: {problem}") from None
    return out
