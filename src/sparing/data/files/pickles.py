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

from sparing.data.files.plain_arrays import array_from_bytes, plain_dtype
from sparing.data.files.unpacking import damage_as_data_error, one_line

_MOST_CONTAINERS = 1_000_000
"""Lists, tuples and dicts in a pickle, and entries of its memo: CIFAR-100 has 50,000."""
_MOST_DIGITS = 40  # of a number written as text
_WIDEST_INTEGER = 16  # bytes of a number written as bytes
_OBJECT_TYPE = "O8"


class PickleWord(NamedTuple):
    """What a pickle calls a function or a class."""

    name: str


class _TypeInTheMaking:
    """A numpy type in the making: the type's name comes first, its byte order later."""

    def __init__(self, name: str) -> None:
        self.name, self.order = name, "|"

    def plain(self) -> np.dtype:
        return plain_dtype(self.order + self.name)


class _EmptyArray:
    """A numpy array before its content."""


PICKLE_WORDS = {
    **{(f"numpy.{core}.multiarray", "_reconstruct"): PickleWord("array") for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): PickleWord("scalar") for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): PickleWord("buffer") for core in ("core", "_core")},
    ("numpy", "ndarray"): PickleWord("ndarray"),
    ("numpy", "dtype"): PickleWord("dtype"),
    ("_codecs", "encode"): PickleWord("encode"),  # how Python 3 writes bytes in old pickles
    ("__builtin__", "bytes"): PickleWord("bytes"),  # and no bytes
}


def unpickle(data: bytes, where: str) -> Any:
    """What a pickle of plain data holds.

    >>> import pickle
    >>> unpickle(pickle.dumps({"x": np.arange(2)}), "here")
    {'x': array([0, 1])}
    """
    with damage_as_data_error(f"{where} is not a pickle of plain arrays"):
        return PickleMachine(data).run()


class PickleMachine:
    """Follows one pickle, which starts at `at`."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at
        self.words, self.make, self.codes = PICKLE_WORDS, VALUE_MAKERS, PICKLE_CODES
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
            if code == _STOP_CODE:
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
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"it holds a number of {len(text):,} digits")
        return text

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_container(self, value: Any) -> None:
        self.held += 1
        if self.held > _MOST_CONTAINERS:
            raise ValueError(f"it holds more than {_MOST_CONTAINERS:,} lists, tuples and dicts")
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
        if not 0 <= index < _MOST_CONTAINERS:
            raise ValueError(f"it numbers a value {index:,}; plain data has at most {_MOST_CONTAINERS:,}")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        value = self.memo[index]
        if isinstance(value, list | dict | np.ndarray | _EmptyArray) or type(value) is tuple:
            raise ValueError("it holds one list, tuple, dict or array in two places")
        self.stack.append(value)

    def count(self, n: int) -> None:
        self.copied += n
        if self.copied > 2 * len(self.data):  # bytes that were written as text count twice
            raise ValueError("it uses the same bytes again and again")

    def word(self, module: str, name: str) -> None:
        known = self.words.get((module.replace("builtins", "__builtin__"), name))
        if known is None:
            raise ValueError(f"it asks for {one_line(f'{module}.{name}')}, which is no plain data")
        self.stack.append(known)

    def reduce(self) -> None:
        args, word = self.pop(), self.pop()
        if not isinstance(word, PickleWord) or type(args) is not tuple or word.name not in self.make:
            raise TypeError("it calls something that is no function of plain data")
        self.push(self.make[word.name](self, *args))

    def build(self) -> None:
        state, value = self.pop(), self.pop()
        if type(state) is not tuple or not isinstance(value, _TypeInTheMaking | _EmptyArray):
            raise TypeError("it changes something that is no array")
        if isinstance(value, _TypeInTheMaking):
            _set_byte_order(value, *state)
        else:
            value = _fill_array(self, *state)
            self.blanks -= 1
        self.push(value)


# Ways to make a value, by the word that stands for them.


def _make_empty_array(machine: PickleMachine, kind: Any, shape: Any, code: Any) -> _EmptyArray:
    if kind != PickleWord("ndarray"):
        raise TypeError("it makes an array that is no numpy array")
    machine.blanks += 1
    return _EmptyArray()


def _make_type(machine: PickleMachine, name: Any, align: Any = False, copy: Any = True) -> _TypeInTheMaking:
    kind = _TypeInTheMaking(str(name))
    if kind.name != _OBJECT_TYPE:
        kind.plain()
    return kind


def _make_scalar(machine: PickleMachine, kind: Any, data: Any) -> Any:
    return array_from_bytes((), _finished_type(kind), _array_bytes(data))[()]


def _make_array_from_buffer(machine: PickleMachine, data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray:
    held = _array_bytes(data)
    machine.count(len(held))
    return array_from_bytes(shape, _finished_type(kind), held, order == "F")


def _make_encoded_bytes(machine: PickleMachine, text: Any, encoding: Any) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"it encodes text as {one_line(encoding)}")
    machine.count(len(text))
    return text.encode("latin1")


def _make_no_bytes(machine: PickleMachine) -> bytes:
    return b""


VALUE_MAKERS: dict[str, Callable[..., Any]] = {
    "array": _make_empty_array,
    "dtype": _make_type,
    "scalar": _make_scalar,
    "buffer": _make_array_from_buffer,
    "encode": _make_encoded_bytes,
    "bytes": _make_no_bytes,
}


def _set_byte_order(kind: _TypeInTheMaking, version: Any, order: Any, *rest: Any) -> None:
    """The byte order, and that there is nothing more to the type: no fields, no shape of its own."""
    if order not in ("<", ">", "|", "=") or any(one is not None for one in rest[:3]):
        raise ValueError("its array is of no plain type")
    kind.order = order


def _fill_array(machine: PickleMachine, version: Any, shape: Any, kind: Any, fortran: Any, content: Any) -> Any:
    """An array; of arrays of objects only the one object that numpy wraps in them when it saves a dict."""
    if isinstance(kind, _TypeInTheMaking) and kind.name == _OBJECT_TYPE:
        if shape != () or type(content) is not list or len(content) != 1:
            raise ValueError("it holds an array of Python objects: save numbers of one shape")
        return content[0]
    held = _array_bytes(content)
    machine.count(len(held))
    return array_from_bytes(shape, _finished_type(kind), held, bool(fortran))


def _finished_type(kind: Any) -> np.dtype:
    if not isinstance(kind, _TypeInTheMaking):
        raise TypeError("its array has no type")
    return kind.plain()


def _array_bytes(data: Any) -> bytes:
    if not isinstance(data, bytes | str):
        raise TypeError("its array has no bytes")
    return data if isinstance(data, bytes) else data.encode("latin1")  # text is how Python 2 wrote bytes


# The instructions, by their code; pickletools has what each means.


def _push_integer(machine: PickleMachine) -> None:
    text = machine.digits().removesuffix("L")
    machine.push({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _push_long(size: int) -> Callable[[PickleMachine], None]:
    def act(machine: PickleMachine) -> None:
        n = machine.number(size)
        if n > _WIDEST_INTEGER:
            raise ValueError(f"it holds a number of {n:,} bytes")
        machine.push(int.from_bytes(machine.take(n), "little", signed=True))

    return act


def _push_unsigned(size: int) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.stack.append(machine.number(size))


def _push_text(size: int, encoding: str) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.stack.append(machine.text(machine.number(size), encoding))


def _push_bytes(size: int) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.stack.append(machine.take(machine.number(size)))


def _push_constant(value: Any) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.stack.append(value)


def _push_container(make: Callable[[], Any]) -> Callable[[PickleMachine], None]:
    return lambda machine: machine.push_container(make())


def _push_tuple(n: int) -> Callable[[PickleMachine], None]:
    def act(machine: PickleMachine) -> None:
        values = [machine.pop() for _ in range(n)]
        machine.push_container(tuple(reversed(values)))

    return act


def _append_item(machine: PickleMachine) -> None:
    value = machine.pop()
    machine.top(list).append(value)


def _append_items(machine: PickleMachine) -> None:
    values = machine.popped()
    machine.top(list).extend(values)


def _set_item(machine: PickleMachine) -> None:
    value, key = machine.pop(), machine.pop()
    machine.top(dict).update(_dict_from_pairs([key, value]))


def _set_items(machine: PickleMachine) -> None:
    values = machine.popped()
    machine.top(dict).update(_dict_from_pairs(values))


def _dict_from_pairs(values: list[Any]) -> dict[Any, Any]:
    if len(values) % 2 or not all(isinstance(key, str | int) for key in values[::2]):
        raise TypeError("it has a dict whose keys are no text")
    return dict(zip(values[::2], values[1::2], strict=True))


def _push_word_from_stack(machine: PickleMachine) -> None:
    name, module = machine.pop(), machine.pop()
    machine.word(str(module), str(name))


_STOP_CODE = ord(".")
PICKLE_CODES: dict[int, Callable[[PickleMachine], Any]] = {
    0x80: lambda m: _check_pickle_version(m.number(1)),
    0x95: lambda m: m.take(8),  # a frame
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("N"): _push_constant(None),
    0x88: _push_constant(True),
    0x89: _push_constant(False),
    ord("I"): _push_integer,
    ord("L"): _push_integer,
    ord("K"): _push_unsigned(1),
    ord("M"): _push_unsigned(2),
    ord("J"): lambda m: m.push(int.from_bytes(m.take(4), "little", signed=True)),
    0x8A: _push_long(1),
    0x8B: _push_long(4),
    ord("F"): lambda m: m.push(float(m.digits())),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    ord("U"): _push_text(1, "latin1"),
    ord("T"): _push_text(4, "latin1"),
    ord("X"): _push_text(4, "utf-8"),
    0x8C: _push_text(1, "utf-8"),
    0x8D: _push_text(8, "utf-8"),
    ord("V"): lambda m: m.push(m.line().encode("latin1").decode("raw-unicode-escape")),
    ord("C"): _push_bytes(1),
    ord("B"): _push_bytes(4),
    0x8E: _push_bytes(8),
    0x96: _push_bytes(8),
    ord("]"): _push_container(list),
    ord("}"): _push_container(dict),
    ord(")"): _push_constant(()),
    ord("l"): lambda m: m.push_container(m.popped()),
    ord("d"): lambda m: m.push_container(_dict_from_pairs(m.popped())),
    ord("t"): lambda m: m.push_container(tuple(m.popped())),
    0x85: _push_tuple(1),
    0x86: _push_tuple(2),
    0x87: _push_tuple(3),
    ord("a"): _append_item,
    ord("e"): _append_items,
    ord("s"): _set_item,
    ord("u"): _set_items,
    ord("p"): lambda m: m.remember(int(m.digits())),
    ord("q"): lambda m: m.remember(m.number(1)),
    ord("r"): lambda m: m.remember(m.number(4)),
    0x94: lambda m: m.remember(len(m.memo)),
    ord("g"): lambda m: m.recall(int(m.digits())),
    ord("h"): lambda m: m.recall(m.number(1)),
    ord("j"): lambda m: m.recall(m.number(4)),
    ord("c"): lambda m: m.word(m.line(), m.line()),
    0x93: _push_word_from_stack,
    ord("R"): PickleMachine.reduce,
    ord("b"): PickleMachine.build,
}


def _check_pickle_version(version: int) -> None:
    if version > 5:
        raise ValueError(f"it is of version {version}; the latest known is 5")
