"""A name with or without options, as a study writes it: `cnn`, or `{mlp: {hidden: [200, 200]}}`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sparing.core.errors import ConfigError, nearest_name


def name_and_options(what: str, entry: Any) -> tuple[str, dict[str, Any]]:
    """(name, options).

    >>> name_and_options("model", "cnn"), name_and_options("model", {"mlp": {"hidden": [9]}})
    (('cnn', {}), ('mlp', {'hidden': [9]}))
    """
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, Mapping) and len(entry) == 1:
        name, options = next(iter(entry.items()))
        if isinstance(name, str) and (options is None or isinstance(options, Mapping)):
            return name, dict(options or {})
    raise ConfigError(f"{what} is {entry!r}: write a name, or {{name: {{option: value}}}}")


def validate_options(
    what: str, name: str, make: Callable[..., Any], options: dict[str, Any], given: int
) -> dict[str, Any]:
    """The options as `make` wants them, beyond its first `given` parameters; what it does not know is refused."""
    known = dict(list(inspect.signature(make, eval_str=True).parameters.items())[given:])
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(f"{what} {name!r} needs the option {key!r}: write {{{name}: {{{key}: ...}}}}")
    out = {}
    for key, value in options.items():
        if key not in known:
            raise unknown_option(what, name, key, known)
        hint = known[key].annotation
        if isinstance(value, bool) and "bool" not in str(hint) and hint not in (inspect.Parameter.empty, Any):
            raise ConfigError(f"{name}.{key} is {str(value).lower()}, which is no number or word it could mean")
        try:
            out[key] = value if hint is inspect.Parameter.empty else TypeAdapter(hint).validate_python(value)
        except ValidationError as error:
            raise ConfigError(f"{name}.{key} is {value!r}: {error.errors()[0]['msg'].lower()}") from None
    return out


def unknown_option(what: str, name: str, option: Any, known: Mapping[str, Any]) -> ConfigError:
    hint = nearest_name(str(option), known) if known else "it takes none"
    return ConfigError(f"{what} {name!r} has no option {option!r}; {hint}")


def unknown_model(name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"no model is called {name!r}: {nearest_name(name, known)}")
