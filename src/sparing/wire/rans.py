"""Entropy coding of bytes: range asymmetric numeral systems (rANS), in whole numbers, the same on every machine.

Symbols may come with a context each, which both ends know; contexts have chances of their own (`frequencies.py`),
neighbours with few symbols together.

    the chances, one head for every table | the symbols

Short sequences have one state that gives bytes: a varint of their number, then the bytes. Long ones are dealt out to
lanes, symbol i to lane i mod H, so that every step is a handful of operations on arrays: a 32-bit state for each lane,
then 16-bit words as the states need them. Beyond 8192 symbols a varint tells H, 0 for one state. Where every table has
one symbol only, nothing follows the heads.

    >>> encode_rans(np.array([1, 0, 0, 0, 0, 0, 0, 0, 2, 0], dtype=np.uint8)).hex()
    '020f00020222d7'
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sparing.core.operation import operation
from sparing.wire import frequencies
from sparing.wire.index import Reader, varint

FEW = 8192
"""Up to so many symbols always have one state."""
LONGEST = 1 << 18
"""More never have."""
SINGLE = 23
"""The bits below which one state takes bytes; it stays below 2^31."""
FEWEST, MOST = 32, 1024
"""Lanes: fewer are slower than one state, more are hardly faster."""
LOW = 1 << 16
"""States of lanes lie from here to 2^32."""
TABLES, SHARE = 32, 64
"""At most so many tables; a table serves at least so many symbols."""
BLOCK = 1 << 16
"""Symbols prepared together."""


class RansPlan(NamedTuple):
    heads: bytes
    tables: np.ndarray  # chances, [tables, 256]
    rows: np.ndarray  # the table of every context
    bits: int  # chances add up to 2^bits
    lanes: int = 0  # none: one state
    size: int = 0  # bytes in all, nearly


def precision(n: int) -> int:
    return min(max(n.bit_length(), 8), 13)


@operation
def plan_rans(symbols: np.ndarray, contexts: np.ndarray | None = None) -> RansPlan:
    """The chances, and what writing uint8 `[n]` in uint8 contexts `[n]` will take."""
    n, bits = len(symbols), precision(len(symbols))
    histograms = _symbol_counts(symbols, contexts)
    rows = rows_of(histograms.sum(1))
    merged = np.zeros((rows[-1] + 1, 256), np.int64)
    np.add.at(merged, rows, histograms)
    told = [frequencies.write_frequencies(one, bits) for one in merged] if n else []
    heads, tables = b"".join(head for head, _ in told), np.array([table for _, table in told], np.int64)
    price = int(frequencies.price(merged, tables, bits).sum()) if n else 0
    lanes, body = lanes_for(price, n), price >> frequencies.FINE + 3
    size = len(heads) + (body + state_bytes(body, lanes) if price else 0)
    return RansPlan(heads, tables, rows, bits, lanes, size)


def state_bytes(body: int, lanes: int) -> int:
    """What is written beside the `body` bytes that the symbols should take."""
    return 2 * lanes if lanes else len(varint(body))


def lanes_for(price: int, n: int) -> int:
    """A lane for 256 bytes that the symbols should take, or for 8192 symbols; each costs two bytes.

    Twice as many beyond 8 kB, where time counts for more than one byte in 128.
    """
    share = price >> frequencies.FINE + 11
    lanes = min(max(share if share < 32 else 2 * share, n >> 13), MOST)
    return lanes if lanes >= FEWEST and n > FEW else 0


def encode_rans(symbols: np.ndarray, contexts: np.ndarray | None = None) -> bytes:
    return write_rans(plan_rans(symbols, contexts), symbols, contexts)


def write_rans(chosen: RansPlan, symbols: np.ndarray, contexts: np.ndarray | None) -> bytes:
    if _is_trivial(chosen.tables, chosen.bits):
        return chosen.heads
    told = varint(chosen.lanes) if len(symbols) > FEW else b""
    body = in_lanes(chosen, symbols, contexts) if chosen.lanes else in_one_state(chosen, symbols, contexts)
    return b"".join([chosen.heads, told, *body])


def decode_rans(reader: Reader, n: int, contexts: np.ndarray | None = None) -> np.ndarray:
    """uint8 `[n]`"""
    start, bits = reader.at, precision(n)
    if not n:
        return np.zeros(0, np.uint8)
    rows = rows_of(np.array([n], np.int64) if contexts is None else _symbol_counts(contexts, None)[0])
    tables = np.array([frequencies.read_frequencies(reader, bits) for _ in range(rows[-1] + 1)], np.int64)
    if _is_trivial(tables, bits):
        alone = tables.argmax(1)[rows].astype(np.uint8)
        return np.full(n, alone[0], np.uint8) if contexts is None else alone[contexts]
    lanes = reader.varint("number of lanes") if n > FEW else 0
    if lanes > MOST or (lanes < min(n >> 13, MOST) if lanes else n > LONGEST):
        reader.refuse(f"{lanes} lanes for {n} symbols", start)
    chosen = RansPlan(b"", tables, rows, bits, lanes)
    return read_lanes(reader, chosen, n, contexts) if lanes else read_one_state(reader, chosen, n, contexts)


def _is_trivial(tables: np.ndarray, bits: int) -> bool:
    return bool((tables.max(1, initial=0) == 1 << bits).all()) if len(tables) else True


def _symbol_counts(symbols: np.ndarray, contexts: np.ndarray | None) -> np.ndarray:
    """How often each symbol occurs in each context, `[contexts, 256]`."""
    rows = 1 if contexts is None else int(contexts.max(initial=0)) + 1
    out = np.zeros(rows * 256, np.int64)
    for at in _block_slices(len(symbols), BLOCK):
        entries = symbols[at] if contexts is None else (contexts[at].astype(np.int64) << 8) + symbols[at]
        out += np.bincount(entries, minlength=len(out))
    return out.reshape(rows, 256)


def rows_of(counts: np.ndarray) -> np.ndarray:
    """The table of every context: contexts fill one after the other, a share at least."""
    share = SHARE
    while True:
        rows, served = [], [0]
        for count in counts.tolist():
            if count and served[-1] >= share:
                served.append(0)
            rows.append(len(served) - 1)
            served[-1] += count
        if len(served) <= TABLES:
            return np.array(rows, np.int64)
        share *= 2


def _block_slices(n: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n)) for start in range(0, n, size))


def _cumulative_starts(tables: np.ndarray) -> np.ndarray:
    """Sum of the chances of the symbols before."""
    return np.cumsum(tables, -1) - tables


def entries_of(chosen: RansPlan, symbols: np.ndarray, contexts: np.ndarray | None) -> np.ndarray:
    return symbols if contexts is None else (chosen.rows << 8)[contexts] + symbols


# --------------------------------------------------------------------------------------------------------- one state


@operation
def in_one_state(chosen: RansPlan, symbols: np.ndarray, contexts: np.ndarray | None) -> list[bytes]:
    """The state takes the symbols from last to first and gives away bytes, which are read from last to first."""
    chance, before = chosen.tables.reshape(-1), _cumulative_starts(chosen.tables).reshape(-1)
    entries = entries_of(chosen, symbols, contexts)[::-1]
    x, out = 0, bytearray()
    for f, c in zip(chance[entries].tolist(), before[entries].tolist(), strict=True):
        while x >> SINGLE + 8 - chosen.bits >= f:
            out.append(x & 255)
            x >>= 8
        x = (x // f << chosen.bits) + x % f + c
    out += x.to_bytes((x.bit_length() + 7) // 8, "little")
    return [varint(len(out)), bytes(reversed(out))]


@operation
def read_one_state(reader: Reader, chosen: RansPlan, n: int, contexts: np.ndarray | None) -> np.ndarray:
    start, bits = reader.at, chosen.bits
    symbol_of, value_of = (table.data for table in slot_tables(chosen))
    bases, out, mask = chosen.rows << bits, bytearray(), (1 << bits) - 1
    data = reader.take(reader.varint("number of bytes"), "bytes of the state")
    x = used = 0
    for base in [0] * n if contexts is None else bases[contexts].tolist():
        while x >> SINGLE == 0 and used < len(data):
            x = x << 8 | data[used]
            used += 1
        slot = base + (x & mask)
        value = value_of[slot]
        x = (value >> 16) * (x >> bits) + (value & 0xFFFF)
        out.append(symbol_of[slot])
    if x or used < len(data):
        reader.refuse("a state that is not used up by its symbols", start)
    return np.frombuffer(out, np.uint8)


def slot_tables(chosen: RansPlan) -> tuple[np.ndarray, np.ndarray]:
    """For every slot of every table: its symbol; the symbol's chance times 2^16, plus how far into it the slot is."""
    size = 1 << chosen.bits
    symbols, values = np.empty(len(chosen.tables) * size, np.uint8), np.empty(len(chosen.tables) * size, np.int64)
    for at, table in zip(_block_slices(len(symbols), size), chosen.tables, strict=True):
        symbols[at] = here = np.repeat(np.arange(256, dtype=np.uint8), table)
        values[at] = ((table << 16) - _cumulative_starts(table))[here] + np.arange(size, dtype=np.int64)
    return symbols, values


# ------------------------------------------------------------------------------------------------------------- lanes


@operation
def in_lanes(chosen: RansPlan, symbols: np.ndarray, contexts: np.ndarray | None) -> list[bytes]:
    """The states after all symbols, taken from last to first, and the words in the order of reading."""
    lanes, top = chosen.lanes, np.uint32(32 - chosen.bits)
    x, high = np.full(lanes, LOW, np.uint32), np.empty(lanes, np.uint32)
    chance, before = (
        table.reshape(-1).astype(np.uint32) for table in (chosen.tables, _cumulative_starts(chosen.tables))
    )
    words = [np.zeros(0, np.uint32)]
    for at in reversed(list(_block_slices(len(symbols), max(BLOCK, lanes) // lanes * lanes))):
        entries = entries_of(chosen, symbols[at], None if contexts is None else contexts[at])
        f, c = chance[entries], before[entries]
        rest = np.uint32(1 << chosen.bits) - f
        for begin in reversed(range(0, len(f), lanes)):
            step = slice(begin, begin + lanes)
            y, q = x[: len(f) - begin], high[: len(f) - begin]
            np.right_shift(y, top, out=q)
            full = (q >= f[step]).nonzero()[0]
            if len(full):
                over = y[full]
                words.append(over & np.uint32(0xFFFF))
                y[full] = over >> np.uint32(16)
            np.floor_divide(y, f[step], out=q)
            q *= rest[step]
            y += q
            y += c[step]
    return [x.astype("<u4").tobytes(), np.concatenate(words[::-1]).astype("<u2").tobytes()]


def read_states(reader: Reader, lanes: int) -> np.ndarray:
    """int64 `[lanes]`"""
    start = reader.at
    x = np.frombuffer(reader.take(4 * lanes, "states"), "<u4").astype(np.int64)
    if x.min() < LOW:
        reader.refuse(f"a state of {x.min()}, must be {LOW} or more", start)
    return x


@operation
def read_lanes(reader: Reader, chosen: RansPlan, n: int, contexts: np.ndarray | None) -> np.ndarray:
    start, lanes = reader.at, chosen.lanes
    x = read_states(reader, lanes)
    words = np.frombuffer(reader.data[reader.at : reader.at + reader.left // 2 * 2], "<u2")
    (symbol_of, value_of), bases, used = slot_tables(chosen), chosen.rows << chosen.bits, 0
    out, first, second = np.empty(n, np.uint8), np.empty(lanes, np.int64), np.empty(lanes, np.int64)
    mask, shift, half, low = (np.int64(number) for number in ((1 << chosen.bits) - 1, chosen.bits, 16, 0xFFFF))
    for at in _block_slices(n, max(BLOCK, lanes) // lanes * lanes):
        slots = np.zeros(at.stop - at.start, np.int64) if contexts is None else bases.take(contexts[at])
        for begin in range(0, len(slots), lanes):
            slot = slots[begin : begin + lanes]
            y, a, b = (x, first, second) if len(slot) == lanes else (z[: len(slot)] for z in (x, first, second))
            slot += np.bitwise_and(y, mask, out=a)
            value_of.take(slot, out=b, mode="wrap")
            y >>= shift
            y *= np.right_shift(b, half, out=a)
            b &= low
            y += b
            short = (y < LOW).nonzero()[0]
            if len(short):
                more = words[used : used + len(short)]
                if len(more) < len(short):
                    reader.refuse("the words end before the symbols do")
                y[short] = y[short] << half | more
                used += len(short)
        symbol_of.take(slots, out=out[at], mode="wrap")
    if (x != LOW).any():
        reader.refuse("states that are not used up by their symbols", start)
    reader.take(2 * used, "words")
    return out
