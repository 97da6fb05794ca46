"""The loops of entropy coding, symbol by symbol: what `wire.rans` and `wire.frequencies` do with arrays."""

import numpy as np

from sparing.accel.compiled.compile import compiled
from sparing.wire import frequencies, rans
from sparing.wire.frequencies import FINE, GEOMETRIC, MEANS, NORMAL, ONE, SCALES, TABLE

CHANCE_LOGS = frequencies.log2(np.maximum(np.arange((1 << 13) + 1, dtype=np.int64), 1))
"""log2 of every chance, in 4096ths."""
FALLS = np.stack(
    [np.stack([frequencies.two_sided_falls(kind, mean) for mean in MEANS.tolist()]) for kind in (GEOMETRIC, NORMAL)]
)
"""Weights of both families, `[2, steepness, distance]`."""
HEAD = 1400
"""No head has more bytes."""
SINGLE, LOW, TABLES, SHARE = rans.SINGLE, rans.LOW, rans.TABLES, rans.SHARE


@compiled
def plan_tables(symbols: np.ndarray, contexts: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Heads, chances `[tables, 256]`, the table of every context, and what the symbols take in 4096ths of a bit.

    Without contexts, `contexts` is empty.
    """
    known = len(contexts) > 0
    count = 1
    if known:
        for context in contexts:
            count = max(count, context + 1)
    histograms = np.zeros((count, 256), np.int64)
    if known:
        for i in range(len(symbols)):
            histograms[contexts[i], symbols[i]] += 1
    else:
        for symbol in symbols:
            histograms[0, symbol] += 1
    return tables_of(histograms, bits)


@compiled
def tables_of(histograms: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The same from how often each symbol occurs in each context, `[contexts, 256]`."""
    rows = table_of_contexts(histograms)
    merged = np.zeros((rows[-1] + 1, 256), np.int64)
    for context in range(len(histograms)):
        merged[rows[context]] += histograms[context]
    tables = np.zeros_like(merged)
    heads, used, price = np.empty(len(merged) * HEAD, np.uint8), 0, 0
    for t in range(len(merged)):
        size, taken = choose_chances(merged[t], bits, heads[used:], tables[t])
        used += size
        price += taken
    return heads[:used], tables, rows, price


@compiled
def table_of_contexts(histograms: np.ndarray) -> np.ndarray:
    """`rans.rows_of`."""
    count, share = len(histograms), SHARE
    rows = np.zeros(count, np.int64)
    while True:
        table, served = 0, 0
        for context in range(count):
            here = histograms[context].sum()
            if here and served >= share:
                table, served = table + 1, 0
            rows[context] = table
            served += here
        if table < TABLES:
            return rows
        share *= 2


@compiled
def choose_chances(histogram: np.ndarray, bits: int, head: np.ndarray, chances: np.ndarray) -> tuple[int, int]:
    """`frequencies.write_frequencies` into `head` and `chances`; bytes of the head, and what the symbols then take."""
    first, last, n = -1, -1, 0
    for symbol in range(256):
        if histogram[symbol]:
            first = symbol if first < 0 else first
            last = symbol
            n += histogram[symbol]
    if first == last:
        head[0], head[1] = ONE, first
        chances[first] = 1 << bits
        return 2, 0
    scale_weights(histogram, bits, first, last, chances)
    size = write_table(chances, last, head)
    taken = price_of(histogram, chances, bits, first, last)
    best = (size << FINE + 3) + taken
    weights, tried = np.zeros(256, np.int64), np.zeros(256, np.int64)
    origin = first + 1 >> 1
    for kind in (GEOMETRIC, NORMAL):
        total = 0
        for symbol in range(first, last + 1):
            distance = (symbol + 1 >> 1) - origin
            total += histogram[symbol] * (distance * distance if kind == NORMAL else distance)
        scale = min(np.searchsorted(MEANS, total * 128 // n), SCALES - 1)
        for symbol in range(first, last + 1):
            weights[symbol] = max(FALLS[kind - GEOMETRIC, scale, (symbol + 1 >> 1) - origin], 1)
        scale_weights(weights, bits, first, last, tried)
        price = price_of(histogram, tried, bits, first, last)
        if (4 << FINE + 3) + price < best:
            best, size, taken = (4 << FINE + 3) + price, 4, price
            head[0], head[1], head[2], head[3] = kind, scale, first, last
            chances[first : last + 1] = tried[first : last + 1]
    return size, taken


@compiled
def scale_weights(weights: np.ndarray, bits: int, first: int, last: int, out: np.ndarray) -> None:
    """Whole numbers that add up to 2^bits, at least 1 where the weight is not zero, all of them from first to last."""
    total, summed = 0, 0
    for symbol in range(first, last + 1):
        total += weights[symbol]
    for symbol in range(first, last + 1):
        out[symbol] = max(((weights[symbol] << bits) + total // 2) // total, 1 if weights[symbol] else 0)
        summed += out[symbol]
    over = summed - (1 << bits)
    while over:
        largest = first
        for symbol in range(first + 1, last + 1):
            if out[symbol] > out[largest]:
                largest = symbol
        less = min(over, out[largest] >> 1)
        out[largest] -= less
        over -= less


@compiled
def price_of(histogram: np.ndarray, chances: np.ndarray, bits: int, first: int, last: int) -> int:
    price = 0
    for symbol in range(first, last + 1):
        if histogram[symbol]:
            price += histogram[symbol] * ((bits << FINE) - CHANCE_LOGS[chances[symbol]])
    return price


@compiled
def write_table(chances: np.ndarray, last: int, head: np.ndarray) -> int:
    """A head that tells every chance up to the last symbol's; how many bytes it has."""
    head[0], head[1] = TABLE, last
    size, waiting, held = 2, 0, 0  # bits that wait for a whole byte
    before = 0
    for symbol in range(last + 1):
        chance, length = chances[symbol], 0
        while chance >> length:
            length += 1
        step = 2 * (length - before) if length >= before else 2 * (before - length) - 1
        below = max(length - 1, 0)
        waiting |= (1 | (chance & (1 << below) - 1) << 1) << held + step
        held += step + 1 + below
        before = length
        while held >= 8:
            head[size] = waiting & 255
            size, waiting, held = size + 1, waiting >> 8, held - 8
    if held:
        head[size] = waiting
        size += 1
    return size


@compiled
def starts_of(tables: np.ndarray) -> np.ndarray:
    """Sum of the chances of the symbols before."""
    out = np.empty_like(tables)
    for t in range(len(tables)):
        before = 0
        for symbol in range(256):
            out[t, symbol] = before
            before += tables[t, symbol]
    return out


@compiled
def write_one_state(
    symbols: np.ndarray, contexts: np.ndarray, tables: np.ndarray, rows: np.ndarray, bits: int
) -> np.ndarray:
    """The bytes of `rans.in_one_state`, in the order of reading."""
    starts, known, top = starts_of(tables), len(contexts) > 0, SINGLE + 8 - bits
    out, used, x, t = np.empty(2 * len(symbols) + 16, np.uint8), 0, 0, 0
    for i in range(len(symbols) - 1, -1, -1):
        if known:
            t = rows[contexts[i]]
        f = tables[t, symbols[i]]
        while x >> top >= f:
            out[used] = x & 255
            used, x = used + 1, x >> 8
        x = (x // f << bits) + x % f + starts[t, symbols[i]]
    while x:
        out[used] = x & 255
        used, x = used + 1, x >> 8
    return out[:used][::-1].copy()


@compiled
def slots_of(tables: np.ndarray, bits: int) -> np.ndarray:
    """The symbol of every slot of every table."""
    out = np.empty((len(tables), 1 << bits), np.uint8)
    for t in range(len(tables)):
        at = 0
        for symbol in range(256):
            out[t, at : at + tables[t, symbol]] = symbol
            at += tables[t, symbol]
    return out


@compiled
def read_one_state(
    data: np.ndarray, n: int, contexts: np.ndarray, tables: np.ndarray, rows: np.ndarray, bits: int
) -> tuple[np.ndarray, bool]:
    """uint8 `[n]`, and whether the bytes were used up by them."""
    starts, slots, known, mask = starts_of(tables), slots_of(tables, bits), len(contexts) > 0, (1 << bits) - 1
    out, used, x, t = np.empty(n, np.uint8), 0, 0, 0
    for i in range(n):
        if known:
            t = rows[contexts[i]]
        while x >> SINGLE == 0 and used < len(data):
            x = x << 8 | data[used]
            used += 1
        slot = x & mask
        symbol = slots[t, slot]
        out[i] = symbol
        x = tables[t, symbol] * (x >> bits) + slot - starts[t, symbol]
    return out, x == 0 and used == len(data)


@compiled
def write_lanes(
    symbols: np.ndarray, contexts: np.ndarray, tables: np.ndarray, rows: np.ndarray, bits: int, lanes: int
) -> tuple[np.ndarray, np.ndarray]:
    """States and words of `rans.in_lanes`, in the order of reading.

    x // f is the whole part of (x + 1/2) (1 / f): f is at most 2^13 and x below 2^32, so no rounding can change it.
    """
    starts, known, top, t = starts_of(tables), len(contexts) > 0, 32 - bits, 0
    inverse = 1.0 / np.maximum(tables, 1)
    x, words, used = np.full(lanes, LOW, np.int64), np.empty(len(symbols), np.uint16), len(symbols)
    n = len(symbols)
    for begin in range((n - 1) // lanes * lanes, -1, -lanes):
        for lane in range(min(lanes, n - begin) - 1, -1, -1):
            symbol, y = symbols[begin + lane], x[lane]
            if known:
                t = rows[contexts[begin + lane]]
            f = tables[t, symbol]
            if y >> top >= f:
                used -= 1
                words[used] = y & 0xFFFF
                y >>= 16
            whole = np.int64((y + 0.5) * inverse[t, symbol])
            x[lane] = y + whole * ((1 << bits) - f) + starts[t, symbol]
    return x.astype(np.uint32), words[used:].copy()


@compiled
def read_lanes(
    states: np.ndarray,
    words: np.ndarray,
    n: int,
    contexts: np.ndarray,
    tables: np.ndarray,
    rows: np.ndarray,
    bits: int,
) -> tuple[np.ndarray, int, bool]:
    """uint8 `[n]`, how many words were taken (-1: there were too few), and whether the states were used up."""
    starts, slots, known, mask = starts_of(tables), slots_of(tables, bits), len(contexts) > 0, (1 << bits) - 1
    x, lanes, out, used, t = states.astype(np.int64), len(states), np.empty(n, np.uint8), 0, 0
    for begin in range(0, n, lanes):
        for lane in range(min(lanes, n - begin)):
            if known:
                t = rows[contexts[begin + lane]]
            y = x[lane]
            slot = y & mask
            symbol = slots[t, slot]
            out[begin + lane] = symbol
            y = tables[t, symbol] * (y >> bits) + slot - starts[t, symbol]
            if y < LOW:
                if used == len(words):
                    return out, -1, False
                y = y << 16 | np.int64(words[used])
                used += 1
            x[lane] = y
    return out, used, bool((x == LOW).all())
