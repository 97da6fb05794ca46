"""Operations with a second body: the plain one says what is meant, another may be faster.

Calling an operation runs its body, which is the plain function until `register` puts another one in its place. Such a
body takes the same arguments and gives the same bits, unless it says otherwise; what it cannot take it hands on to
`plain`. Nothing here or in any plain body knows where its tensors live. Faster bodies are imported when the first
operation is called, or something else asks for them (`install_waiting`): importing an operation alone costs nothing.

    >>> @operation
    ... def double(x: int) -> int:
    ...     return x + x
    >>> register(double, lambda x: 2 * x)
    >>> double(3), double.plain(3)
    (6, 6)
"""

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Operation(Protocol, Generic[P, R]):
    plain: Callable[..., Any]
    body: Callable[..., Any]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


OPERATIONS: list[Operation] = []
_waiting: list[Callable[[], object]] = []
_waiting_lock = RLock()


def before_first_operation(install: Callable[[], object]) -> None:
    """Have `install` register its bodies as late as that."""
    _waiting.append(install)


def install_waiting() -> None:
    """Whatever waits for the first operation is installed now."""
    if _waiting:
        with _waiting_lock:
            while _waiting:
                for made in OPERATIONS:
                    made.body = made.plain
                _waiting.pop()()


def operation(plain: Callable[P, R]) -> Operation[P, R]:
    """A function that may get a faster body."""

    @wraps(plain)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return made.body(*args, **kwargs)

    def first(*args: P.args, **kwargs: P.kwargs) -> R:
        install_waiting()
        return made.body(*args, **kwargs)

    made = cast(Operation[P, R], call)
    made.plain, made.body = plain, first if _waiting else plain
    OPERATIONS.append(made)
    return made


def register(made: Operation, body: Callable[..., Any]) -> None:
    """From now on calls of this operation run `body`."""
    install_waiting()
    made.body = body


def plain_again() -> None:
    """Every operation runs its plain body."""
    install_waiting()
    for made in OPERATIONS:
        made.body = made.plain
