"""A second decoder of tight codes, number by number, written from docs/wire.md alone; it imports nothing of ours."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate


class Bytes:
    def __init__(self, data: bytes):
        self.data = data

    def take(self, n: int) -> bytes:
        taken, self.data = self.data[:n], self.data[n:]
        assert len(taken) == n
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = shift = 0
        while (byte := self.byte()) > 127:
            value, shift = value + (byte - 128 << shift), shift + 7
        return value + (byte << shift)

    def bits(self, count: int) -> list[int]:
        raw = self.take(-(-count // 8))
        out = [byte >> j & 1 for byte in raw for j in range(8)]
        assert not any(out[count:])
        return out[:count]

    def packed(self, count: int, width: int) -> list[int]:
        bits = self.bits(count * width)
        return [sum(bits[i * width + j] << j for j in range(width)) for i in range(count)]


# ------------------------------------------------------------------------------------------------------------ chances


def chances_of(weights: list[int], b: int) -> list[int]:
    total = sum(weights)
    f = [max((w * (1 << b) + total // 2) // total, 1) if w else 0 for w in weights]
    while (e := sum(f) - (1 << b)) != 0:
        i = f.index(max(f))
        f[i] -= min(e, f[i] >> 1)
    return f


def smallest_gap(symbol: int) -> int:
    if symbol >= 240:
        return 1 << 60
    return symbol if symbol < 16 else (4 + symbol % 4) << (symbol // 4 - 2)


def mean_of(j: int) -> int:
    return ((16, 19, 23, 27)[j % 4] << (j // 4)) >> 3


@cache
def family(kind: int, j: int, first: int, last: int, b: int) -> list[int]:
    a, weights = mean_of(j), [0] * 256
    top = a if kind == 2 else 2 * a
    q = (top << 32) // (top + 128)
    z, w, by_distance = q * q >> 32, 1 << 32, []
    for _ in range(130):
        by_distance.append(w)
        w = w * q >> 32
        q = q * z >> 32 if kind == 3 else q
    fall = [by_distance[max((s + 1) // 2 - (first + 1) // 2, 0)] for s in range(256)]
    for s in range(first, last + 1):
        weights[s] = max(fall[s], 1)
    return chances_of(weights, b)


def read_head(data: Bytes, b: int) -> list[int]:
    kind = data.byte()
    f = [0] * 256
    if kind == 0:
        f[data.byte()] = 1 << b
    elif kind == 1:
        last = data.byte()
        stream = unending(data)
        before = 0
        for s in range(last + 1):
            zeros = 0
            while not next(stream):
                zeros += 1
            before += zeros // 2 if zeros % 2 == 0 else -(zeros + 1) // 2
            if before:
                f[s] = (1 << before - 1) + sum(next(stream) << i for i in range(before - 1))
    else:
        assert kind in (2, 3)
        f = family(kind, data.byte(), data.byte(), data.byte(), b)
    assert sum(f) == 1 << b
    return f


def unending(data: Bytes) -> Iterator[int]:
    while True:
        byte = data.byte()
        for j in range(8):
            yield byte >> j & 1


# ------------------------------------------------------------------------------------------------------------ symbols


def tables_of(counts: list[int]) -> list[int]:
    t = 64
    while True:
        table, served, out = 0, 0, []
        for k in counts:
            if k and served >= t:
                table, served = table + 1, 0
            served += k
            out.append(table)
        if table < 32:
            return out
        t *= 2


def symbols(data: Bytes, contexts: list[int]) -> list[int]:
    n = len(contexts)
    if not n:
        return []
    b = min(max(n.bit_length(), 8), 13)
    counts = Counter(contexts)
    table = tables_of([counts[c] for c in range(max(contexts) + 1)])
    f = [read_head(data, b) for _ in range(table[-1] + 1)]
    which = [table[c] for c in contexts]
    slots = [[s for s in range(256) for _ in range(one[s])] for one in f]
    starts = [[0, *accumulate(one)] for one in f]

    def pop(x: int, t: int) -> tuple[int, int]:
        s = slots[t][x % (1 << b)]
        return s, f[t][s] * (x >> b) + x % (1 << b) - starts[t][s]

    if all(max(one) == 1 << b for one in f):
        return [slots[t][0] for t in which]
    h = data.varint() if n > 8192 else 0
    assert min(n >> 13, 1024) <= h <= 1024 if h else n <= 1 << 18
    return lanes(data, which, h, pop) if h else one_state(data, which, pop)


def one_state(data: Bytes, which: list[int], pop: Callable) -> list[int]:
    rest, x, out = list(data.take(data.varint())), 0, []
    for t in which:
        while x < 1 << 23 and rest:
            x = 256 * x + rest.pop(0)
        s, x = pop(x, t)
        out.append(s)
    assert x == 0
    assert not rest
    return out


def lanes(data: Bytes, which: list[int], h: int, pop: Callable) -> list[int]:
    states = [int.from_bytes(data.take(4), "little") for _ in range(h)]
    assert min(states) >= 1 << 16
    out = []
    for at in range(0, len(which), h):
        some = which[at : at + h]
        for lane, t in enumerate(some):
            s, states[lane] = pop(states[lane], t)
            out.append(s)
        for lane in range(len(some)):
            if states[lane] < 1 << 16:
                states[lane] = states[lane] << 16 | int.from_bytes(data.take(2), "little")
    assert set(states) == {1 << 16}
    return out


# ------------------------------------------------------------------------------------------------- positions and codes


def is_matrix(u: int, columns: int | None) -> bool:
    if not columns or u % columns:
        return False
    return columns >= 8 and u // columns >= 8 and 16 * (columns + u // columns) <= u + 16384


def levels(data: Bytes, rows: int, columns: int) -> tuple[list[int], list[int]]:
    out = symbols(data, [0] * rows + [1] * columns)
    assert max(out) < 64
    return out[:rows], out[rows:]


def index(data: Bytes, u: int, columns: int | None) -> list[bool]:
    code = data.byte()
    if code < 3:
        return [code == 0] * u if code < 2 else [bool(x) for x in data.bits(u)]
    if code == 3:
        return rice(data, u)
    if code == 4:
        by_class = {0: list(range(u))}
        kept = set(gaps(data, by_class))
        return [i in kept for i in range(u)]
    assert code == 5
    assert is_matrix(u, columns)
    assert columns
    of_row, of_column = levels(data, u // columns, columns)
    by_class = {}
    for i in range(u):
        a, b = of_row[i // columns], of_column[i % columns]
        if a and b:
            by_class.setdefault(a + b, []).append(i)
    kept = set(gaps(data, dict(sorted(by_class.items()))))
    return [i in kept for i in range(u)]


def rice(data: Bytes, u: int) -> list[bool]:
    low, count = data.byte(), data.varint()
    skipped = [0] * count
    for shift in [*range(0, low - low % 8, 8), low - low % 8]:
        skipped = [g + (x << shift) for g, x in zip(skipped, data.packed(count, min(8, low - shift)), strict=True)]
    stream, place, out = unending(data), -1, [False] * u
    for gap in skipped:
        zeros = 0
        while not next(stream):
            zeros += 1
        place += gap + (zeros << low) + 1
        out[place] = True
    return out


def gaps(data: Bytes, by_class: dict[int, list[int]]) -> list[int]:
    counts = [data.varint() for _ in by_class]
    found = symbols(data, [number for number, k in enumerate(counts) for _ in range(k)])
    skipped = [smallest_gap(s) for s in found]
    for at in range(0, len(found), 65536):
        widths = [s // 4 - 2 if s >= 16 else 0 for s in found[at : at + 65536]]
        bits = iter(data.bits(sum(widths)))
        for bit in range(max(widths, default=0)):
            for i, width in enumerate(widths):
                if width > bit:
                    skipped[at + i] += next(bits) << bit
    kept, rest = [], iter(skipped)
    for count, places in zip(counts, by_class.values(), strict=True):
        at = -1
        for _ in range(count):
            at += next(rest) + 1
            kept.append(places[at])
    return kept


def codes(data: Bytes, n: int, columns: int | None, kept: list[bool] | None = None) -> list[int]:
    code = data.byte()
    if code == 0:
        w = data.byte()
        return [x - (1 << w) if x >> (w - 1) else x for x in data.packed(n, w)]
    if code == 5:
        alive = index(data, n, columns if kept is None else None)
        assert data.data[0] != 5
        rest = iter(codes(data, sum(alive), columns if kept is None else None, alive))
        return [next(rest) if there else 0 for there in alive]
    where = [i for i, there in enumerate(kept if kept is not None else [True] * n) if there]
    u = n if kept is None else len(kept)
    context = [0] * n
    if code == 2:
        assert columns
        assert u % columns == 0
        assert 2 <= u // columns <= 256
        context = [i // columns for i in where]
    elif code == 3:
        assert kept is None
        assert is_matrix(n, columns)
        assert columns
        rows, cols = levels(data, n // columns, columns)
        pairs = [(rows[i // columns], cols[i % columns]) for i in where]
        context = [a + b if a and b else 0 for a, b in pairs]
    elif code == 4:
        assert kept is not None
        assert is_matrix(u, columns)
        assert columns
        by_row, by_column = Counter(i // columns for i in where), Counter(i % columns for i in where)
        context = [(by_row[i // columns] ** 2).bit_length() + (by_column[i % columns] ** 2).bit_length() for i in where]
    else:
        assert code == 1
    return [s // 2 if s % 2 == 0 else -(s + 1) // 2 for s in symbols(data, context)]
