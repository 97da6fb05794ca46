"""Code that a study names: `my_file.py:Net`, or `package.module:factory` as Python finds it.

A file is run only if this user trusts its very bytes; see `tasks.trust`. A module under the current folder is a file
like any other. Of what Python finds among installed packages, the call is trusted: its name and the study's options.
"""

import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
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
    return _REFERENCE.fullmatch(text) is not None


class CodeCall(NamedTuple):
    """What a study would call, and with which options of its own."""

    reference: str
    options: Mapping[str, Any] = {}

    @property
    def place(self) -> str:
        return self.reference.rpartition(":")[0]


def code_in(task: Mapping[str, Any]) -> dict[str, CodeCall]:
    """The code that the task section of a study names, by its keys.

    >>> code_in({"data": "digits", "model": {"nets.py:Net": {"width": 8}}})
    {'model': CodeCall(reference='nets.py:Net', options={'width': 8})}
    """
    found = {}
    for key in CODE_KEYS:
        entry = task.get(key)
        name, options = next(iter(entry.items()), (None, None)) if isinstance(entry, Mapping) else (entry, None)
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


def code_files(call: CodeCall, copies: Path | None = None) -> list[CodeFile]:
    """What must be trusted before this may be called: the files that it runs. `copies`: where a run keeps its own."""
    place, reference = call.place, call.reference
    if place.endswith(".py"):
        return [_read_code(_kept_copy(place, copies) or Path(place), Path(place), reference)]
    files = [_read_code(path, path, reference) for path in _modules_here(place)]
    said = json.dumps([reference, call.options], sort_keys=True, default=str)
    return files or [CodeFile(Path(place), said.encode(), Path(place), is_call=True)]


def load_code(call: CodeCall, copies: Path | None = None) -> Any:
    """The class or function that a study names."""
    reference, place, name = call.reference, call.place, call.reference.rpartition(":")[2]
    files = code_files(call, copies)
    for file in files:
        if not is_trusted(file.sha256):
            raise ConfigError(untrusted_sentence(call, file))
    module = _run_file(files[0]) if place.endswith(".py") else _import_module(place, reference)
    if not hasattr(module, name):
        known = [word for word in vars(module) if not word.startswith("_")]
        raise ConfigError(f"{reference}: {place} defines no {name!r}; {nearest_name(name, known)}")
    found = getattr(module, name)
    if not callable(found):
        raise ConfigError(f"{reference} is a {type(found).__name__}; name a class or a function")
    return found


def untrusted_sentence(call: CodeCall, file: CodeFile) -> str:
    reference = call.reference
    if file.is_call:
        options = ", ".join(f"{name}={value!r}" for name, value in call.options.items())
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


def _kept_copy(place: str, copies: Path | None) -> Path | None:
    copy = copies / copy_name(place) if copies is not None else None
    return copy if copy is not None and copy.is_file() else None


def copy_name(place: str) -> str:
    """What the copy of a file is called in a run folder.

    >>> copy_name("models/net.py")
    'net-b3af.py'
    """
    return f"{Path(place).stem}-{hashlib.sha256(place.encode()).hexdigest()[:4]}.py"


def _read_code(path: Path, place: Path, reference: str) -> CodeFile:
    try:
        return CodeFile(path, path.read_bytes(), place)
    except OSError as error:
        raise ConfigError(f"{reference}: cannot read {path} ({error.strerror}); check the path") from None


def _modules_here(dotted: str) -> Iterator[Path]:
    """The files of this module and the packages it lies in, if it lies under the current folder."""
    folder, found = Path(), []
    for part in dotted.split("."):
        package, module = folder / part / "__init__.py", folder / f"{part}.py"
        if not (folder / part).is_dir() and not module.is_file():
            return
        found += [path for path in (package, module) if path.is_file()][:1]
        folder = folder / part
    yield from found


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


def _import_module(dotted: str, reference: str) -> ModuleType:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(dotted)
    except Exception as error:
        hint = "name a file (my_file.py:Net) or a module that Python finds"
        raise ConfigError(f"{reference}: cannot import {dotted} ({_first_line(error)}); {hint}") from error
    finally:
        sys.path.remove(here)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
