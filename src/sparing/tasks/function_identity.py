"""By what two functions, such as losses and metrics, are told apart: a digest that is the same in every process.

A function of this package counts by its name, another one by its code, its defaults, and the plain values and
functions of its own file that it uses; a module or an object by its class, its public settings and its tensors. What
begins with an underscore does not count, as a metric's state changes while it is in use.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MEMORY_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEEPEST = 5  # function in function


def function_identity(function: Callable[..., Any]) -> str:
    """
    >>> from functools import partial
    >>> twice, again, thrice = (partial(pow, exp=n) for n in (2, 2, 3))
    >>> function_identity(twice) == function_identity(again), function_identity(twice) == function_identity(thrice)
    (True, False)
    """
    digest = hashlib.sha256()
    for word in _words(function, _DEEPEST):
        digest.update(word + b"|")
    return digest.hexdigest()


def without_addresses(text: str) -> str:
    """What an object says of itself, without where it lies in memory."""
    return _MEMORY_ADDRESS.sub("", text)


def _words(value: Any, deep: int) -> Iterator[bytes]:
    """What tells this value from others."""
    yield type(value).__qualname__.encode()
    if isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif isinstance(value, Tensor | np.ndarray):
        yield from _array_words(value)
    elif isinstance(value, FunctionType):
        yield from _function_words(value, deep)
    elif isinstance(value, functools.partial):
        yield from _words_of_all((value.func, value.args, value.keywords), deep)
    elif isinstance(value, MethodType):
        yield from _words_of_all((value.__func__, value.__self__), deep)
    elif isinstance(value, Mapping):
        yield from _words_of_all(
            [x for pair in sorted(value.items(), key=lambda pair: repr(pair[0])) for x in pair], deep
        )
    elif isinstance(value, list | tuple | set | frozenset):
        yield from _words_of_all(sorted(value, key=repr) if isinstance(value, set | frozenset) else value, deep)
    elif isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        yield getattr(value, "__qualname__", without_addresses(repr(value))).encode()
    else:
        yield from _object_words(value, deep)


def _words_of_all(values: Any, deep: int) -> Iterator[bytes]:
    if deep:
        for one in values:
            yield from _words(one, deep - 1)


def _array_words(x: Tensor | np.ndarray) -> Iterator[bytes]:
    yield f"{x.dtype}{tuple(x.shape)}".encode()
    if isinstance(x, Tensor):
        yield x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield without_addresses(repr(x.tolist())).encode()


def _function_words(function: FunctionType, deep: int) -> Iterator[bytes]:
    yield function.__qualname__.encode()
    if function.__module__.startswith("sparing.") and not function.__closure__:
        return
    yield from _code_words(function.__code__)
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    yield from _words_of_all(
        [function.__defaults__, function.__kwdefaults__, *cells, *_used_of_its_file(function)], deep
    )


def _used_of_its_file(function: FunctionType) -> list[Any]:
    """Plain values and functions of the file that it stands in; what is imported counts by the name in its code."""
    around = function.__globals__
    found = [around[name] for name in sorted(_names_used(function.__code__)) if name in around]
    return [x for x in found if isinstance(x, (*_PLAIN, tuple)) or getattr(x, "__globals__", None) is around]


def _code_words(code: CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield repr(code.co_names).encode()
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _code_words(one)
        else:
            yield repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one).encode()


def _names_used(code: CodeType) -> set[str]:
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*(_names_used(one) for one in inner))


def _object_words(value: Any, deep: int) -> Iterator[bytes]:
    """An instance: what it is called by, its public settings and, of a module, its tensors."""
    call = getattr(type(value), "forward" if isinstance(value, nn.Module) else "__call__", None)
    settings = {name: x for name, x in vars(value).items() if not name.startswith("_") and name != "training"}
    tensors = value.state_dict() if isinstance(value, nn.Module) else {}
    inner = dict(value.named_children()) if isinstance(value, nn.Module) else {}
    yield from _words_of_all([call if isinstance(call, FunctionType) else None, settings, tensors, inner], deep)
