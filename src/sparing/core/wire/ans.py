"""Entropy coding of bytes: range asymmetric numeral systems (rANS), in whole numbers, the same on every machine.

Symbols may come with a context each, which both ends know; contexts have chances of their own (`chances.py`),
neighbours with few symbols together.

    the chances, one head for every table | the symbols

Up to 8192 symbols become whole numbers of 1024 symbols each: a varint of a number's length, then so many bytes. More
are dealt out to 2^j lanes, symbol i to lane i mod 2^j, so that every step is a handful of operations on arrays: a
32-bit state for each lane, then 16-bit words as the states need them. A state starts with 16 bits that say nothing; so
that many lanes cost little, these hold the first words of the last symbols, which have fewer lanes of their own. Where
every table has one symbol only, nothing follows the heads.

    >>> encode(np.array([1, 0, 0, 0, 0, 0, 0, 0, 2, 0], dtype=np.uint8)).hex()
    '030f000202d722'
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sparing.core.wire import chances
from sparing.core.wire.index import Reader, packed_size, varint

FEW, NUMBER = 8192, 1024
"""Up to so many symbols are written as whole numbers, each of so many."""
LOW = 1 << 16
"""States lie from here to 2^32."""
TABLES, SHARE = 32, 64
"""At most so many tables; a table serves at least so many symbols."""
BLOCK = 1 << 16
"""Symbols prepared together."""


class Plan(NamedTuple):
    heads: bytes
    tables: np.ndarray  # chances, [tables, 256]
    rows: np.ndarray  # the table of every context
    served: list[int]  # symbols of every table
    bits: int  # chances add up to 2^bits
    size: int  # bytes in all, nearly


def precision(n: int) -> int:
    return min(max(n.bit_length(), 8), 13)


def plan(symbols: np.ndarray, contexts: np.ndarray | None = None) -> Plan:
    """The chances, and what writing uint8 `[n]` in uint8 contexts `[n]` will take."""
    n, bits = len(symbols), precision(len(symbols))
    histograms = counted(symbols, contexts)
    rows, served = rows_of(histograms.sum(1))
    merged = np.zeros((len(served), 256), np.int64)
    np.add.at(merged, rows, histograms)
    told = [chances.head(one, bits) for one in merged] if n else []
    heads, tables = b"".join(head for head, _ in told), np.array([table for _, table in told], np.int64)
    price = sum(chances.price(one, table, bits) for one, table in zip(merged, tables, strict=False))
    extra = 3 * lanes_for(price, n).head // 2 if n > FEW else 2 * (n // NUMBER + 1)
    size = len(heads) + (price >> chances.FINE + 3) + (extra if price else 0)
    return Plan(heads, tables, rows, served, bits, size)


def encode(symbols: np.ndarray, contexts: np.ndarray | None = None) -> bytes:
    return write(plan(symbols, contexts), symbols, contexts)


def write(chosen: Plan, symbols: np.ndarray, contexts: np.ndarray | None) -> bytes:
    if trivial(chosen.tables, chosen.bits):
        return chosen.heads
    if len(symbols) <= FEW:
        return b"".join([chosen.heads, *numbers(chosen, symbols, contexts)])
    return b"".join([chosen.heads, *many(chosen, symbols, contexts)])


def decode(reader: Reader, n: int, contexts: np.ndarray | None = None) -> np.ndarray:
    """uint8 `[n]`; anything `encode` would not have written is refused."""
    start, bits = reader.at, precision(n)
    if not n:
        return np.zeros(0, np.uint8)
    rows, served = rows_of(np.array([n], np.int64) if contexts is None else counted(contexts, None)[0])
    tables = np.array([chances.read(reader, bits) for _ in served], np.int64)
    heads = bytes(reader.data[start : reader.at])
    chosen = Plan(heads, tables, rows, served, bits, 0)
    if trivial(tables, bits):
        alone = tables.argmax(1)[rows].astype(np.uint8)
        symbols = np.full(n, alone[0], np.uint8) if contexts is None else alone[contexts]
    elif n <= FEW:
        symbols = read_numbers(reader, chosen, n, contexts)
    else:
        symbols = read_many(reader, chosen, n, contexts)
    if heads != plan(symbols, contexts).heads:
        reader.refuse("chances that are not those of the symbols", start)
    return symbols


def trivial(tables: np.ndarray, bits: int) -> bool:
    return bool((tables.max(1, initial=0) == 1 << bits).all()) if len(tables) else True


def counted(symbols: np.ndarray, contexts: np.ndarray | None) -> np.ndarray:
    """How often each symbol occurs in each context, `[contexts, 256]`."""
    rows = 1 if contexts is None else int(contexts.max(initial=0)) + 1
    out = np.zeros(rows * 256, np.int64)
    for at in blocks(len(symbols), BLOCK):
        entries = symbols[at] if contexts is None else (contexts[at].astype(np.int64) << 8) + symbols[at]
        out += np.bincount(entries, minlength=len(out))
    return out.reshape(rows, 256)


def rows_of(counts: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """The table of every context, and what each table serves: contexts fill one after the other, a share at least."""
    share = SHARE
    while True:
        rows, served = [], [0]
        for count in counts.tolist():
            if count and served[-1] >= share:
                served.append(0)
            rows.append(len(served) - 1)
            served[-1] += count
        if len(served) <= TABLES:
            return np.array(rows, np.int64), served
        share *= 2


def blocks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def starts(tables: np.ndarray) -> np.ndarray:
    """Sum of the chances of the symbols before."""
    return np.cumsum(tables, -1) - tables


def entries_of(chosen: Plan, symbols: np.ndarray, contexts: np.ndarray | None) -> np.ndarray:
    return symbols if contexts is None else (chosen.rows << 8)[contexts] + symbols


# ---------------------------------------------------------------------------------------------------- whole numbers


def numbers(chosen: Plan, symbols: np.ndarray, contexts: np.ndarray | None) -> Iterator[bytes]:
    entries = entries_of(chosen, symbols, contexts)
    chance, before = chosen.tables.reshape(-1)[entries].tolist(), starts(chosen.tables).reshape(-1)[entries].tolist()
    for at in blocks(len(symbols), NUMBER):
        x = 0
        for f, c in zip(reversed(chance[at]), reversed(before[at]), strict=True):
            high, low = divmod(x, f)
            x = (high << chosen.bits) + low + c
        size = (x.bit_length() + 7) // 8
        yield varint(size) + x.to_bytes(size, "little")


def read_numbers(reader: Reader, chosen: Plan, n: int, contexts: np.ndarray | None) -> np.ndarray:
    start, bits = reader.at, chosen.bits
    symbol_of, value_of = (table.data for table in slot_tables(chosen))
    bases = [0] * n if contexts is None else (chosen.rows << bits)[contexts].tolist()
    out, mask = bytearray(), (1 << bits) - 1
    for at in blocks(n, NUMBER):
        size = reader.varint("length of a number")
        if size > packed_size(at.stop - at.start, bits):  # k symbols make a number below 2^(k bits)
            reader.refuse(f"a number of {size} bytes for {at.stop - at.start} symbols", start)
        raw = reader.take(size, "number")
        if size and not raw[-1]:
            reader.refuse(f"a number of {size} bytes whose last is zero", start)
        x = int.from_bytes(raw, "little")
        for base in bases[at]:
            slot = base + (x & mask)
            value = value_of[slot]
            x = (value >> 16) * (x >> bits) + (value & 0xFFFF)
            out.append(symbol_of[slot])
        if x:
            reader.refuse("a number that is not used up by its symbols", start)
    return np.frombuffer(out, np.uint8)


def slot_tables(chosen: Plan) -> tuple[np.ndarray, np.ndarray]:
    """For every slot of every table: its symbol; the symbol's chance times 2^16, plus how far into it the slot is."""
    size = 1 << chosen.bits
    symbols, values = np.empty(len(chosen.tables) * size, np.uint8), np.empty(len(chosen.tables) * size, np.int64)
    for at, table in zip(blocks(len(symbols), size), chosen.tables, strict=True):
        symbols[at] = here = np.repeat(np.arange(256, dtype=np.uint8), table)
        values[at] = ((table << 16) - starts(table))[here] + np.arange(size, dtype=np.int64)
    return symbols, values


# ------------------------------------------------------------------------------------------------------- many lanes


class Lanes(NamedTuple):
    head: int  # a power of two
    tail: int
    after: int  # so many symbols are left for the tail's lanes


def lanes_for(price: int, n: int) -> Lanes:
    """A lane for 256 bytes that the symbols should take, or for 1024 symbols; at most 4096.

    The tail has an eighth of the lanes, and so many symbols that the words they take should fill the head's states.
    """
    head = 1 << min(max(price >> chances.FINE + 11, n >> 10).bit_length() - 1, 12)
    return Lanes(head, head // 8, min((17 * head * n << chances.FINE) // max(price, 1), n // 8))


def lanes_of(chosen: Plan) -> Lanes:
    """Worked out from the chances, which both ends know."""
    prices = [chances.price(table, table, chosen.bits) for table in chosen.tables]
    price = sum(n * price >> chosen.bits for n, price in zip(chosen.served, prices, strict=True))
    return lanes_for(price, sum(chosen.served))


def cut(symbols: np.ndarray, contexts: np.ndarray | None, at: slice) -> tuple[np.ndarray, np.ndarray | None]:
    return symbols[at], None if contexts is None else contexts[at]


def many(chosen: Plan, symbols: np.ndarray, contexts: np.ndarray | None) -> list[bytes]:
    """States of the head and of the tail, words of the head, those words of the tail that found no place in states."""
    lanes = lanes_of(chosen)
    split = len(symbols) - lanes.after
    tail, later = run(chosen, np.full(lanes.tail, LOW, np.int64), *cut(symbols, contexts, slice(split, None)))
    first = np.full(lanes.head, LOW, np.int64)
    first[: len(later)] += later[: lanes.head]
    head, words = run(chosen, first, *cut(symbols, contexts, slice(split)))
    states = np.concatenate([head, tail])
    return [states.astype("<u4").tobytes(), np.concatenate([words, later[lanes.head :]]).astype("<u2").tobytes()]


def run(chosen: Plan, x: np.ndarray, symbols: np.ndarray, contexts: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The states after all symbols, taken from last to first, and the words in the order of reading."""
    bits, lanes = chosen.bits, len(x)
    chance, before = chosen.tables.reshape(-1), starts(chosen.tables).reshape(-1)
    words, high = [np.zeros(0, np.int64)], np.empty(lanes, np.int64)
    for at in reversed(list(blocks(len(symbols), max(BLOCK, lanes) // lanes * lanes))):
        entries = entries_of(chosen, *cut(symbols, contexts, at))
        f, c = chance[entries], before[entries]
        most, rest = f << 32 - bits, (1 << bits) - f
        for step in reversed(list(blocks(len(f), lanes))):
            y, q = x[: step.stop - step.start], high[: step.stop - step.start]
            full = np.greater_equal(y, most[step]).nonzero()[0]
            if len(full):
                over = y[full]
                words.append(over & 0xFFFF)
                y[full] = over >> 16
            np.floor_divide(y, f[step], out=q)
            q *= rest[step]
            y += q
            y += c[step]
    return x, np.concatenate(words[::-1])


def read_many(reader: Reader, chosen: Plan, n: int, contexts: np.ndarray | None) -> np.ndarray:
    start, lanes = reader.at, lanes_of(chosen)
    states = np.frombuffer(reader.take(4 * (lanes.head + lanes.tail), "states"), "<u4").astype(np.int64)
    if states.min() < LOW:
        reader.refuse(f"a state of {states.min()}, must be {LOW} or more", start)
    head, tail = states[: lanes.head], states[lanes.head :]
    words = np.frombuffer(reader.data[reader.at : reader.at + reader.left // 2 * 2], "<u2")
    out, tables = np.empty(n, np.uint8), slot_tables(chosen)
    rest, before = cut(out, contexts, slice(n - lanes.after)), cut(out, contexts, slice(n - lanes.after, None))
    used = read_run(reader, chosen, tables, head, *rest, words)
    later = np.concatenate([(head & 0xFFFF).astype(np.uint16), words[used : used + lanes.after]])
    again = read_run(reader, chosen, tables, tail, *before, later)
    if (head >> 16 != 1).any() or later[again : lanes.head].any() or (tail != LOW).any():
        reader.refuse("states that are not used up by their symbols", start)
    reader.take(2 * (used + max(again - lanes.head, 0)), "words")
    return out


def read_run(
    reader: Reader,
    chosen: Plan,
    tables: tuple[np.ndarray, np.ndarray],
    x: np.ndarray,
    out: np.ndarray,
    contexts: np.ndarray | None,
    words: np.ndarray,
) -> int:
    """Fill `out` from the states, which are changed, and from so many words."""
    (symbol_of, value_of), bases, lanes = tables, chosen.rows << chosen.bits, len(x)
    slot, value, used, low = np.empty(lanes, np.int64), np.empty(lanes, np.int64), 0, np.int64(0xFFFF)
    mask, shift, half = np.int64((1 << chosen.bits) - 1), np.int64(chosen.bits), np.int64(16)
    for step in blocks(len(out), lanes):
        if step.stop - step.start < lanes:
            x, slot, value = (array[: step.stop - step.start] for array in (x, slot, value))
        np.bitwise_and(x, mask, out=slot)
        if contexts is not None:
            slot += bases.take(contexts[step])
        symbol_of.take(slot, out=out[step], mode="wrap")
        value_of.take(slot, out=value, mode="wrap")
        x >>= shift
        np.right_shift(value, half, out=slot)
        x *= slot
        value &= low
        x += value
        short = (x < LOW).nonzero()[0]
        if len(short):
            more = words[used : used + len(short)]
            if len(more) < len(short):
                reader.refuse("the words end before the symbols do")
            x[short] = x[short] << half | more
            used += len(short)
    return used
