"""Pickles of plain data, read by a machine that has nothing to call.

A pickle is a program. This reader knows the instructions that make numbers, text, bytes, lists, tuples, dicts and numpy
arrays of numbers, as CIFAR's and PFLlib's files hold them, and refuses all others. The functions that such a pickle
names are words to it: each stands for one way to make a value from checked arguments, and none is imported or called.
A list, dict or array stands in one place only, so that a small file cannot mean a large value.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sparing.task.data.plain import array_of, plain_kind
from sparing.task.data.unpacking import brief, reading

MOST = 1_000_000
"""Lists, tuples and dicts in a pickle, and entries of its memo: CIFAR-100 has 50,000."""
DIGITS = 40  # of a number written as text
WIDEST = 16  # bytes of a number written as bytes
OBJECT = "O8"


class Word(NamedTuple):
    """What a pickle calls a function or a class."""

    name: str


class Kind:
    """A numpy type in the making: the type's name comes first, its byte order later."""

    def __init__(self, name: str) -> None:
        self.name, self.order = name, "|"

    def plain(self) -> np.dtype:
        return plain_kind(self.order + self.name)


class Blank:
    """A numpy array before its content."""


WORDS = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): Word("array") for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): Word("scalar") for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): Word("buffer") for core in ("core", "_core")},
    ("numpy", "ndarray"): Word("ndarray"),
    ("numpy", "dtype"): Word("dtype"),
    ("_codecs", "encode"): Word("encode"),  # how Python 3 writes bytes in old pickles
    ("__builtin__", "bytes"): Word("bytes"),  # and no bytes
}


def unpickle(data: bytes, where: str) -> Any:
    """What a pickle of plain data holds.

    >>> import pickle
    >>> unpickle(pickle.dumps({"x": np.arange(2)}), "here")
    {'x': array([0, 1])}
    """
    with reading(f"{where} is not a pickle of plain arrays"):
        return Machine(data).run()


class Machine:
    """Follows one pickle, which starts at `at`."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at
        self.words, self.make, self.codes = WORDS, MAKE, CODES
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.held = 0  # lists, tuples and dicts
        self.blanks = 0
        self.copied = 0  # bytes that stand in values, which the file must hold as well

    def run(self) -> Any:
        """Follow the instructions up to the end; ValueError, or another of BROKEN, where they make no sense."""
        data, codes = self.data, self.codes
        while True:
            code = data[self.at]
            self.at += 1
            if code == STOP:
                break
            act = codes.get(code)
            if act is None:
                raise ValueError(f"it holds the instruction {bytes([code])!r}, which plain data has no need of")
            act(self)
        if len(self.stack) != 1 or self.marks or self.blanks:
            raise ValueError("it ends before its values are complete")
        return self.stack[0]

    def take(self, n: int) -> bytes:
        start = self.at
        self.at += n
        if self.at > len(self.data):
            raise EOFError("it is cut short")
        return self.data[start : self.at]

    def text(self, n: int, encoding: str) -> str:
        start = self.at
        self.at += n
        if self.at > len(self.data):
            raise EOFError("it is cut short")
        return str(memoryview(self.data)[start : self.at], encoding)

    def number(self, n: int) -> int:
        return int.from_bytes(self.take(n), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode("latin1")
        self.at = end + 1
        return text

    def digits(self) -> str:
        text = self.line()
        if len(text) > DIGITS:
            raise ValueError(f"it holds a number of {len(text):,} digits")
        return text

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_container(self, value: Any) -> None:
        self.held += 1
        if self.held > MOST:
            raise ValueError(f"it holds more than {MOST:,} lists, tuples and dicts")
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise IndexError("it takes a value that is not there")
        return self.stack.pop()

    def popped(self) -> list[Any]:
        """All values since the last mark."""
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def top(self, kind: type) -> Any:
        """The container that is being filled."""
        if len(self.stack) <= (self.marks[-1] if self.marks else 0) or type(self.stack[-1]) is not kind:
            raise TypeError(f"it fills something that is no {kind.__name__}")
        return self.stack[-1]

    def remember(self, index: int) -> None:
        if not 0 <= index < MOST:
            raise ValueError(f"it numbers a value {index:,}; plain data has at most {MOST:,}")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        value = self.memo[index]
        if isinstance(value, list | dict | np.ndarray | Blank) or type(value) is tuple:
            raise ValueError("it holds one list, tuple, dict or array in two places")
        self.stack.append(value)

    def count(self, n: int) -> None:
        self.copied += n
        if self.copied > 2 * len(self.data):  # bytes that were written as text count twice
            raise ValueError("it uses the same bytes again and again")

    def word(self, module: str, name: str) -> None:
        known = self.words.get((module.replace("builtins", "__builtin__"), name))
        if known is None:
            raise ValueError(f"it asks for {brief(f'{module}.{name}')}, which is no plain data")
        self.stack.append(known)

    def reduce(self) -> None:
        args, word = self.pop(), self.pop()
        if not isinstance(word, Word) or type(args) is not tuple or word.name not in self.make:
            raise TypeError("it calls something that is no function of plain data")
        self.push(self.make[word.name](self, *args))

    def build(self) -> None:
        state, value = self.pop(), self.pop()
        if type(state) is not tuple or not isinstance(value, Kind | Blank):
            raise TypeError("it changes something that is no array")
        if isinstance(value, Kind):
            order_of(value, *state)
        else:
            value = fill(self, *state)
            self.blanks -= 1
        self.push(value)


# Ways to make a value, by the word that stands for them.


def blank(machine: Machine, kind: Any, shape: Any, code: Any) -> Blank:
    if kind != Word("ndarray"):
        raise TypeError("it makes an array that is no numpy array")
    machine.blanks += 1
    return Blank()


def dtype(machine: Machine, name: Any, align: Any = False, copy: Any = True) -> Kind:
    kind = Kind(str(name))
    if kind.name != OBJECT:
        kind.plain()
    return kind


def scalar(machine: Machine, kind: Any, data: Any) -> Any:
    return array_of((), typed(kind), as_bytes(data))[()]


def buffer(machine: Machine, data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    held = as_bytes(data)
    machine.count(len(held))
    return array_of(shape, typed(kind), held, order == "F")


def encode(machine: Machine, text: Any, encoding: Any) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"it encodes text as {brief(encoding)}")
    machine.count(len(text))
    return text.encode("latin1")


def no_bytes(machine: Machine) -> bytes:
    return b""


MAKE: dict[str, Callable[..., Any]] = {
    "array": blank,
    "dtype": dtype,
    "scalar": scalar,
    "buffer": buffer,
    "encode": encode,
    "bytes": no_bytes,
}


def order_of(kind: Kind, version: Any, order: Any, *rest: Any) -> None:
    """The byte order, and that there is nothing more to the type: no fields, no shape of its own."""
    if order not in ("<", ">", "|", "=") or any(one is not None for one in rest[:3]):
        raise ValueError("its array is of no plain type")
    kind.order = order


def fill(machine: Machine, version: Any, shape: Any, kind: Any, fortran: Any, content: Any) -> Any:
    """An array; of arrays of objects only the one object that numpy wraps in them when it saves a dict."""
    if isinstance(kind, Kind) and kind.name == OBJECT:
        if shape != () or type(content) is not list or len(content) != 1:
            raise ValueError("it holds an array of Python objects: save numbers of one shape")
        return content[0]
    held = as_bytes(content)
    machine.count(len(held))
    return array_of(shape, typed(kind), held, bool(fortran))


def typed(kind: Any) -> np.dtype:
    if not isinstance(kind, Kind):
        raise TypeError("its array has no type")
    return kind.plain()


def as_bytes(data: Any) -> bytes:
    if not isinstance(data, bytes | str):
        raise TypeError("its array has no bytes")
    return data if isinstance(data, bytes) else data.encode("latin1")  # text is how Python 2 wrote bytes


# The instructions, by their code; pickletools has what each means.


def whole(machine: Machine) -> None:
    text = machine.digits().removesuffix("L")
    machine.push({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def long(size: int) -> Callable[[Machine], None]:
    def act(machine: Machine) -> None:
        n = machine.number(size)
        if n > WIDEST:
            raise ValueError(f"it holds a number of {n:,} bytes")
        machine.push(int.from_bytes(machine.take(n), "little", signed=True))

    return act


def unsigned(size: int) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.number(size))


def text(size: int, encoding: str) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.text(machine.number(size), encoding))


def raw(size: int) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)))


def constant(value: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.stack.append(value)


def container(make: Callable[[], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.push_container(make())


def tuple_of(n: int) -> Callable[[Machine], None]:
    def act(machine: Machine) -> None:
        values = [machine.pop() for _ in range(n)]
        machine.push_container(tuple(reversed(values)))

    return act


def append(machine: Machine) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def appends(machine: Machine) -> None:
    values = machine.popped()
    machine.top(list).extend(values)


def set_item(machine: Machine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.top(dict).update(paired([key, value]))


def set_items(machine: Machine) -> None:
    values = machine.popped()
    machine.top(dict).update(paired(values))


def paired(values: list[Any]) -> dict[Any, Any]:
    if len(values) % 2 or not all(isinstance(key, str | int) for key in values[::2]):
        raise TypeError("it has a dict whose keys are no text")
    return dict(zip(values[::2], values[1::2], strict=True))


def stack_word(machine: Machine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.word(str(module), str(name))


STOP = ord(".")
CODES: dict[int, Callable[[Machine], Any]] = {
    0x80: lambda m: check_version(m.number(1)),
    0x95: lambda m: m.take(8),  # a frame
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("N"): constant(None),
    0x88: constant(True),
    0x89: constant(False),
    ord("I"): whole,
    ord("L"): whole,
    ord("K"): unsigned(1),
    ord("M"): unsigned(2),
    ord("J"): lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    0x8A: long(1),
    0x8B: long(4),
    ord("F"): lambda m: m.push(float(m.digits())),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("U"): text(1, "latin1"),
    ord("T"): text(4, "latin1"),
    ord("X"): text(4, "utf-8"),
    0x8C: text(1, "utf-8"),
    0x8D: text(8, "utf-8"),
    ord("V"): lambda m: m.push(m.line().encode("latin1").decode("raw-unicode-escape")),
    ord("C"): raw(1),
    ord("B"): raw(4),
    0x8E: raw(8),
    0x96: raw(8),
    ord("]"): container(list),
    ord("}"): container(dict),
    ord(")"): constant(()),
    ord("l"): lambda m: m.push_container(m.popped()),
    ord("d"): lambda m: m.push_container(paired(m.popped())),
    ord("t"): lambda m: m.push_container(tuple(m.popped())),
    0x85: tuple_of(1),
    0x86: tuple_of(2),
    0x87: tuple_of(3),
    ord("a"): append,
    ord("e"): appends,
    ord("s"): set_item,
    ord("u"): set_items,
    ord("p"): lambda m: m.remember(int(m.digits())),
    ord("q"): lambda m: m.remember(m.number(1)),
    ord("r"): lambda m: m.remember(m.number(4)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("g"): lambda m: m.recall(int(m.digits())),
    ord("h"): lambda m: m.recall(m.number(1)),
    ord("j"): lambda m: m.recall(m.number(4)),
    ord("c"): lambda m: m.word(m.line(), m.line()),
    0x93: stack_word,
    ord("R"): Machine.reduce,
    ord("b"): Machine.build,
}


def check_version(version: int) -> None:
    if version > 5:
        raise ValueError(f"it is of version {version}; the latest known is 5")
