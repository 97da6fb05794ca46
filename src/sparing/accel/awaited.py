"""Mappings that are still being worked out: whoever looks into one waits."""

from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Awaited(Mapping[str, Value], Generic[Value]):
    """
    >>> dict(Awaited(lambda: {"w": 1.0}))
    {'w': 1.0}
    """

    def __init__(self, come: Callable[[], Mapping[str, Value]]):
        self.come: Callable[[], Mapping[str, Value]] | None = come
        self.came: Mapping[str, Value] = {}
        self.turn = Lock()

    @property
    def found(self) -> Mapping[str, Value]:
        with self.turn:
            if self.come is not None:
                self.came, self.come = self.come(), None
            return self.came

    def __reduce__(self) -> tuple[type[dict], tuple[Mapping[str, Value]]]:
        return dict, (self.found,)

    def __getitem__(self, name: str) -> Value:
        return self.found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)
