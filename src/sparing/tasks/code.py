"""Code that a study names: `my_file.py:Net`, or `package.module:factory` of an installed package.

A file is run only if this user trusts its very bytes; see `tasks.trust`. Of an installed package, the call is trusted:
its name and the study's options.
"""

import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from sparing.core.errors import ConfigError, nearest_name
from sparing.tasks.trust import is_trusted

_REFERENCE = re.compile(r"(?P<place>[^:]+\.py|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+):(?P<name>[A-Za-z_]\w*)")


CODE_KEYS = ("data", "model", "loss")
"""Keys of a study's task section that may name code."""


class CodeFile(NamedTuple):
    """A file that a study would run, read once: what is looked at is what is run. Or a call of an installed package."""

    path: Path
    text: bytes
    place: Path  # where it lay when the study was written: what it calls its own folder
    is_call: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text).hexdigest()


def is_code(text: str) -> bool:
    """Whether this names code.

    >>> is_code("my_file.py:Net"), is_code("package.module:factory"), is_code("cnn"), is_code("npz:data")
    (True, True, False, False)
    """
    return text.isprintable() and _REFERENCE.fullmatch(text) is not None


class CodeCall(NamedTuple):
    """What a study would call, and with which options of its own."""

    reference: str
    options: Mapping[str, Any] = {}

    @property
    def place(self) -> str:
        return self.reference.rpartition(":")[0]

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py")


def code_in(task: Mapping[str, Any]) -> dict[str, CodeCall]:
    """The code that the task section of a study names, by its keys.

    >>> code_in({"data": "digits", "model": {"nets.py:Net": {"width": 8}}})
    {'model': CodeCall(reference='nets.py:Net', options={'width': 8})}
    """
    found = {}
    for key in CODE_KEYS:
        entry = task.get(key)
        if isinstance(entry, Mapping) and len(entry) != 1:
            continue  # no name with options; refused elsewhere
        name, options = next(iter(entry.items())) if isinstance(entry, Mapping) else (entry, None)
        if isinstance(name, str) and is_code(name):
            found[key] = CodeCall(name, options if isinstance(options, Mapping) else {})
    return found


def place_beside(reference: str, folders: tuple[Path, ...]) -> str:
    """The reference with its file as seen from the current folder; it must lie in one of these folders."""
    place, _, name = reference.rpartition(":")
    if not place.endswith(".py"):
        return reference
    for folder in folders:
        found, home = (folder / place).resolve(), folder.resolve()
        if found.is_file() and found.is_relative_to(home):
            here = Path.cwd().resolve()
            return f"{found.relative_to(here) if found.is_relative_to(here) else found}:{name}"
    if any((folder / place).exists() for folder in folders):
        raise ConfigError(f"{reference}: {place} lies elsewhere; code must lie beside the study or under this folder")
    raise ConfigError(f"{reference}: there is no file {place} beside the study or under this folder; check the path")


def code_file(call: CodeCall, copies: Path | None = None) -> CodeFile:
    """What must be trusted before this may be called. `copies`: where a run keeps the files that it began with."""
    place, reference = Path(call.place), call.reference
    if not call.is_file:
        options = sorted((repr(name), repr(value)) for name, value in call.options.items())
        return CodeFile(place, f"{reference} {options}".encode(), place, is_call=True)
    path = place if copies is None else copies / copy_name(call.place)
    try:
        return CodeFile(path, path.read_bytes(), place)
    except OSError as error:
        raise ConfigError(f"{reference}: cannot read {path} ({error.strerror}); check the path") from None


def load_code(call: CodeCall, copies: Path | None = None) -> Any:
    """The class or function that a study names."""
    reference, name = call.reference, call.reference.rpartition(":")[2]
    file = code_file(call, copies)
    if not is_trusted(file.sha256):
        raise ConfigError(untrusted_sentence(call, file))
    module = _run_file(file) if call.is_file else _import_installed(call)
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_")]
        raise ConfigError(f"{reference}: {call.place} defines no {name!r}; {nearest_name(name, known)}")
    found = getattr(module, name)
    if not callable(found):
        raise ConfigError(f"{reference} is a {type(found).__name__}; name a class or a function")
    if call.is_file and getattr(found, "__module__", None) != module.__name__:
        raise ConfigError(f"{reference}: {call.place} only imports {name}; define there what uses it")
    return found


def untrusted_sentence(call: CodeCall, file: CodeFile) -> str:
    reference = call.reference
    if file.is_call:
        options = ", ".join(f"{name!s:.40}={value!r:.80}" for name, value in call.options.items())
        return f"the study would call {reference}({options}), which you have not done before; add --trust to do it"
    lines = file.text.count(b"\n")
    return (
        f"{reference} would run {file.path} ({lines} lines, sha256 {file.sha256[:12]}), which you have not run before; "
        "look at it, then add --trust"
    )


def call_code(call: CodeCall, offered: Mapping[str, Any], copies: Path | None = None) -> Any:
    """What it gives, called with a study's options and whatever it takes of what is offered."""
    reference, options, make = call.reference, call.options, load_code(call, copies)
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        return make(**options)
    anything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    for option in options:
        if option not in parameters and not anything:
            raise ConfigError(f"{reference} has no option {option!r}; {nearest_name(option, parameters)}")
    given = {name: value for name, value in offered.items() if name in parameters} | dict(options)
    for name, one in parameters.items():
        optional = one.default is not one.empty or one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        if not optional and name not in given:
            raise ConfigError(f"{reference} needs {name!r}; write {{{reference}: {{{name}: ...}}}}")
    return make(**given)


def copy_name(place: str) -> str:
    """What the copy of a file is called in a run folder.

    >>> copy_name("models/net.py")
    'net-59f6229ef65bc8e1.py'
    """
    return f"{Path(place).stem}-{hashlib.sha256(place.encode()).hexdigest()[:16]}.py"


def _run_file(file: CodeFile) -> ModuleType:
    """The module that these bytes make; the same bytes are run once."""
    name = f"sparing_code_{file.sha256[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(file.place.resolve())
    sys.modules[name] = module
    try:
        exec(compile(file.text, module.__file__, "exec"), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        raise ConfigError(f"{file.path} failed while it was loaded ({_first_line(error)}); repair it") from error
    return module


def _import_installed(call: CodeCall) -> ModuleType:
    """The module as an installed package has it: nothing in the current folder can take its place."""
    if call.place.split(".")[0] == "sparing":
        raise ConfigError(f"{call.reference} is sparing's own; a study names what sparing has by its name")
    paths, here = list(sys.path), Path.cwd().resolve()
    sys.path[:] = [path for path in paths if path and Path(path).resolve() != here]
    try:
        return importlib.import_module(call.place)
    except Exception as error:
        hint = "name a file (my_file.py:Net) or a module of an installed package"
        raise ConfigError(f"{call.reference}: cannot import {call.place} ({_first_line(error)}); {hint}") from error
    finally:
        sys.path[:] = paths


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
