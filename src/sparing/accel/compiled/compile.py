"""How a loop over numbers is compiled: once a machine, kept on disk, without Python's lock."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.sigutils import normalize_signature

F = TypeVar("F", bound=Callable[..., Any])


def compiled(loop: F) -> F:
    """The same function, compiled when it is first called; where no folder can be written, anew in every process."""
    made: Any = njit(loop, nogil=True)
    with suppress(RuntimeError):
        made._cache = _Kept(loop)
    return cast(F, made)


class _Kept(FunctionCache):
    """On disk, as far as that goes: a full one, or a file that was cut short, costs time alone.

    Two processes that compile a loop for different arguments at once may leave the code for the one under the other's
    name, which would read beyond the ends of its arrays.
    """

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            found = super().load_overload(sig, target_context)
        except (OSError, EOFError, pickle.UnpicklingError):
            found = None
        else:
            if found is None or tuple(found.signature.args) == tuple(normalize_signature(sig)[0]):
                return found
        with suppress(OSError):
            self.flush()
        return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):
            super().save_overload(sig, data)
