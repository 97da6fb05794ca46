"""How a loop over numbers is compiled: once a machine, kept on disk, without Python's lock."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(loop: F) -> F:
    """The same function, compiled when it is first called; where no folder can be written, anew in every process."""
    try:
        return cast(F, njit(loop, cache=True, nogil=True))
    except RuntimeError:
        return cast(F, njit(loop, nogil=True))
