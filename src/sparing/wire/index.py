"""Index codes: which positions of a universe are kept, in the fewest bytes, and the bit layouts they are made of.

A universe is a row of u positions that both ends can number. Four codes compete and the shortest wins, the lowest
code number where two are equally short, so a set of positions has exactly one encoding:

    0 all      nothing follows
    1 none     nothing follows
    2 bitmap   ceil(u / 8) bytes
    3 Rice     gaps between kept positions: r low bits each, packed, and the rest in unary

Bits fill bytes from the lowest bit up. Encoding and decoding are NumPy in blocks; `index_bytes` is the closed form.

    >>> bits = np.zeros(1000, dtype=bool)
    >>> bits[[3, 500]] = True
    >>> b"".join(encode_index(bits)).hex()
    '030702033811'
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import WireError
from sparing.core.operation import operation

ALL, NONE, BITMAP, RICE = range(4)
BLOCK = 1 << 16
"""Positions looked at together where memory must stay small."""

Buffer = bytes | memoryview
Number = Any  # an int, or int64 numbers in an array: the closed forms serve both


class Reader:
    """Bytes from the network, read once from front to back, never beyond the end."""

    def __init__(self, data: memoryview, where: str = "header"):
        self.data, self.where, self.at, self.end = data, where, 0, len(data)

    @property
    def left(self) -> int:
        return self.end - self.at

    def refuse(self, why: str, at: int | None = None) -> NoReturn:
        raise WireError(f"{self.where}, offset {self.at if at is None else at}: {why}")

    def take(self, n: int, what: str) -> memoryview:
        if n > self.left:
            self.refuse(f"{what} needs {n} bytes, {self.left} are left")
        self.at += n
        return self.data[self.at - n : self.at]

    def byte(self, what: str) -> int:
        return self.take(1, what)[0]

    def varint(self, what: str) -> int:
        start, value, shift, byte = self.at, 0, 0, 128
        while byte > 127:
            if shift == 63:
                self.refuse(f"{what} has more than 9 bytes", start)
            byte = self.byte(what)
            value |= (byte & 127) << shift
            shift += 7
        if shift > 7 and not byte:
            self.refuse(f"{what} {value} is written with more bytes than it needs", start)
        return value

    def packed(self, count: int, width: int, what: str) -> memoryview:
        """`count` codes of `width` bits, the unused bits of the last byte checked to be zero."""
        raw = self.take(packed_size(count, width), what)
        used = count * width % 8
        if used and raw[-1] >> used:
            self.refuse(f"padding after {what} is {raw[-1] >> used:#x}, must be zero", self.at - 1)
        return raw

    def section(self, where: str) -> "Reader":
        """A reader of the next length-prefixed section; this one continues behind it."""
        outer, self.where = self.where, where
        n = self.varint("section length")
        start = self.at
        self.take(n, "section")
        self.where = outer
        inner = Reader(self.data, where)
        inner.at, inner.end = start, self.at
        return inner

    def close(self) -> None:
        if self.left:
            self.refuse(f"{self.left} bytes too many")


def bit_length(x: Number) -> Number:
    return np.frexp(x.astype(np.float64))[1].astype(np.int64) if isinstance(x, np.ndarray) else x.bit_length()


def varint_size(x: Number) -> Number:
    return (bit_length(x | 1) + 6) // 7


def packed_size(count: Number, width: Number) -> Number:
    return (count * width + 7) // 8


def rice_size(count: Number, low: Number, quotients: Number) -> Number:
    """Bytes of a Rice index: low's byte, the count, the low bits in whole bytes and the rest, the unary part."""
    lows = low // 8 * count + packed_size(count, low % 8)
    return 1 + varint_size(count) + lows + (count + quotients + 7) // 8


def low_bits(count: Number, skipped: Number) -> Number:
    """How many low bits of a gap are written plainly, for `count` gaps that sum to `skipped`.

    The best number for geometric gaps of mean m is log2(m / 2) + 1, nearly; all in whole numbers, so that every
    machine agrees.

    >>> low_bits(count=10, skipped=990)
    6
    """
    return bit_length((2 * skipped + count) // (4 * count))


def varint(x: int) -> bytes:
    """LEB128: seven bits a byte, lowest first.

    >>> varint(300).hex()
    'ac02'
    """
    out = bytearray()
    while x > 127:
        out.append(x & 127 | 128)
        x >>= 7
    return bytes([*out, x])


def pack(codes: np.ndarray, width: int) -> bytes:
    """uint8 codes below 2^width, `width` bits each, 1 to 8.

    >>> pack(np.array([1, 2, 3], dtype=np.uint8), 4).hex()
    '2103'
    """
    if width == 8:
        return codes.tobytes()
    groups = -(-len(codes) // 8)
    padded = np.zeros(groups * 8, np.uint8)
    padded[: len(codes)] = codes
    words = np.zeros(groups, "<u8")  # eight codes fill `width` bytes
    for j in range(8):
        words |= padded[j::8].astype(np.uint64) << np.uint64(j * width)
    return words.view(np.uint8).reshape(groups, 8)[:, :width].tobytes()[: packed_size(len(codes), width)]


def unpack(raw: Buffer, width: int, count: int) -> np.ndarray:
    """`count` uint8 codes, a block at a time.

    >>> unpack(bytes.fromhex("2103"), 4, 3)
    array([1, 2, 3], dtype=uint8)
    """
    out = np.empty(count, np.uint8)
    for start in range(0, count, BLOCK):
        part = out[start : start + BLOCK]
        part[:] = unpack_some(raw, width, start, len(part))
    return out


def unpack_some(raw: Buffer, width: int, start: int, n: int) -> np.ndarray:
    """Codes start .. start + n as uint8."""
    if width == 8:
        return np.frombuffer(raw[start : start + n], np.uint8)
    first, last = start // 8, -(-(start + n) // 8)
    some = np.frombuffer(raw[first * width : last * width], np.uint8)
    whole = np.zeros((last - first) * width, np.uint8)
    whole[: len(some)] = some
    words = np.zeros((last - first, 8), np.uint8)
    words[:, :width] = whole.reshape(-1, width)
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(width)
    codes = words.view("<u8") >> shifts & np.uint64((1 << width) - 1)
    return codes.astype(np.uint8).reshape(-1)[start % 8 : start % 8 + n]


class IndexPlan(NamedTuple):
    """How a set of positions is written."""

    code: int
    low: int = 0  # plain low bits of every gap
    kept: int = 0
    quotients: int = 0  # sum of what remains of the gaps, = zeros in the unary part


def plan_index(bits: np.ndarray, places: np.ndarray | None = None) -> IndexPlan:
    """The shortest code for bool `[u]`; whoever has the kept positions may give them."""
    count = int(np.count_nonzero(bits))
    if count in (0, len(bits)):
        return IndexPlan(ALL if count == len(bits) else NONE)
    skipped = (last_true(bits) if places is None else int(places[-1])) + 1 - count
    low = low_bits(count, skipped)
    quotients = skipped
    if low:
        quotients = quotient_sum(places, low) if places is not None else quotient_sum_of_mask(bits, low)
    wins = rice_size(count, low, quotients) < packed_size(len(bits), 1)
    return IndexPlan(RICE, low, count, quotients) if wins else IndexPlan(BITMAP)


@operation
def quotient_sum(places: np.ndarray, low: int) -> int:
    """The sum of gap >> low over the gaps before these places."""
    return int((np.diff(places, prepend=-1) - 1 >> low).sum())


def quotient_sum_of_mask(bits: np.ndarray, low: int) -> int:
    return sum(int((gaps >> low).sum()) for gaps in gap_blocks(bits))


def last_true(bits: np.ndarray) -> int:
    for end in range(len(bits), 0, -BLOCK):
        start = max(end - BLOCK, 0)
        if bits[start:end].any():
            return start + int(np.flatnonzero(bits[start:end])[-1])
    return -1


def gap_blocks(bits: np.ndarray) -> Iterator[np.ndarray]:
    """How many positions were skipped before every kept one, int64, a block at a time."""
    before = -1
    for start in range(0, len(bits), BLOCK):
        places = np.flatnonzero(bits[start : start + BLOCK])
        if len(places):
            places += start
            yield np.diff(places, prepend=before) - 1
            before = int(places[-1])


def encode_index(bits: np.ndarray) -> list[bytes]:
    """Bool `[u]` as the code's byte and what follows it."""
    chosen = plan_index(bits)
    if chosen.code == BITMAP:
        return [bytes([BITMAP]), np.packbits(bits, bitorder="little").tobytes()]
    return [bytes([chosen.code]), *(_write_rice(bits, chosen) if chosen.code == RICE else [])]


def _write_rice(bits: np.ndarray, chosen: IndexPlan) -> list[bytes]:
    _, low, count, quotients = chosen
    gaps = np.diff(np.flatnonzero(bits), prepend=-1) - 1
    planes = [(gaps >> shift).astype(np.uint8).tobytes() for shift in range(0, low - 7, 8)]
    if low % 8:
        planes.append(pack(((gaps & ((1 << low) - 1)) >> (low - low % 8)).astype(np.uint8), low % 8))
    ends = np.cumsum((gaps >> low) + 1) - 1
    unary = np.zeros(count + quotients, bool)
    unary[ends] = True
    return [bytes([low]), varint(count), *planes, np.packbits(unary, bitorder="little").tobytes()]


def decode_index(reader: Reader, u: int) -> np.ndarray:
    """Bool `[u]` from the reader; anything `encode_index` would not have written is refused."""
    start = reader.at
    code = reader.byte("index code")
    if code in (ALL, NONE):
        if code == NONE and u == 0:
            reader.refuse("an empty universe is written as 'all'", start)
        return np.full(u, code == ALL, bool)
    if code == RICE:
        return decode_rice(reader, u)
    if code != BITMAP:
        reader.refuse(f"index code {code}, known are 0 to 3", start)
    bits = np.unpackbits(np.frombuffer(reader.packed(u, 1, "bitmap"), np.uint8), count=u, bitorder="little").view(bool)
    if (best := plan_index(bits).code) != BITMAP:
        reader.refuse(f"a bitmap where index code {best} is shorter", start)
    return bits


def decode_rice(reader: Reader, u: int) -> np.ndarray:
    start = reader.at
    low, count = reader.byte("Rice parameter"), reader.varint("Rice count")
    if not 0 < count < u:
        reader.refuse(f"Rice count {count} of {u} positions, must lie between", start)
    if low > u.bit_length() or rice_size(count, low, 0) >= packed_size(u, 1):
        reader.refuse(f"a Rice index of {count} gaps with {low} low bits is no shorter than a bitmap of {u}", start)
    planes = [reader.take(count, "Rice low bytes") for _ in range(low // 8)]
    top = reader.packed(count, low % 8, "Rice low bits")

    bits = np.zeros(u, bool)
    last, seen, lows = -1, 0, 0
    for ends in unary_blocks(reader, count):
        rank = np.arange(seen, seen + len(ends), dtype=np.int64)
        quotients = ends - rank  # zeros so far
        if quotients[-1] > u >> low:
            reader.refuse(f"a gap leads beyond the {u} positions", start)
        low_sums = np.cumsum(low_parts(planes, top, low, seen, len(ends))) + lows
        places = (quotients << low) + low_sums + rank
        last, seen, lows = int(places[-1]), seen + len(ends), int(low_sums[-1])
        if last >= u:
            reader.refuse(f"position {last} of {u}", start)
        bits[places] = True
    if low != low_bits(count, last + 1 - count):
        reader.refuse(f"Rice parameter {low}, must be {low_bits(count, last + 1 - count)}", start)
    if reader.at - start >= packed_size(u, 1):
        reader.refuse(f"a Rice index of {reader.at - start} bytes, a bitmap has {packed_size(u, 1)}", start)
    return bits


def low_parts(planes: list[memoryview], top: memoryview, low: int, start: int, n: int) -> np.ndarray:
    """The low bits of gaps start .. start + n, int64."""
    out = np.zeros(n, np.int64)
    if low % 8:
        out += unpack_some(top, low % 8, start, n)
    for plane in reversed(planes):
        out = out << 8 | unpack_some(plane, 8, start, n)
    return out


def unary_blocks(reader: Reader, count: int) -> Iterator[np.ndarray]:
    """Where each of `count` unary numbers ends, as bit offsets, int64, a block at a time."""
    start, seen = reader.at, 0
    while seen < count:
        if not reader.left:
            reader.refuse(f"the unary part ends after {seen} of {count} gaps")
        offset = (reader.at - start) * 8
        raw = reader.take(min(BLOCK // 8, reader.left), "unary part")
        ends = np.flatnonzero(np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little"))[: count - seen]
        if not len(ends):
            continue
        ends += offset
        seen += len(ends)
        if seen == count:
            final, used = divmod(int(ends[-1]), 8)
            reader.at = start + final + 1
            if raw[final - offset // 8] >> (used + 1):
                reader.refuse("padding after the unary part must be zero", reader.at - 1)
        yield ends


class IndexSizes(NamedTuple):
    """Of R universes: bytes behind the code byte, and positions kept; arrays `[R]` of int64."""

    size: np.ndarray
    kept: np.ndarray


def index_bytes(bits: Tensor, universe: Tensor) -> IndexSizes:
    """Bytes of `encode_index` for R universes, `[R]` int64, whose bool positions stand in `bits` one after the other.

    >>> index_bytes(torch.tensor([True, True, False, True]), torch.tensor([2, 2])).size
    array([0, 1])
    """
    places = places_of(bits)
    if not len(places):
        return IndexSizes(*np.zeros((2, len(universe)), np.int64))
    stop = universe.cumsum(0)
    upto = torch.searchsorted(places, stop)
    kept = upto - torch.nn.functional.pad(upto[:-1], (1, 0))
    last = places[(upto - 1).clamp(min=0)] - (stop - universe)
    there, kept_there, last = torch.stack([universe, kept, last]).cpu().numpy()
    _, low = rice_of(kept_there, last)
    quotients = low
    if low.any():
        far = torch.from_numpy(low).to(kept.device)
        quotients = quotient_sums(places, stop - universe, upto, kept, far).cpu().numpy()
    return sizes_from(there, kept_there, last, quotients)


@operation
def places_of(bits: Tensor) -> Tensor:
    """Where a row of booleans is true, `[n]` int64."""
    return bits.nonzero()[:, 0]


def rice_of(kept: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the gaps before `kept` positions sum to, the last of them given, and how many low bits they then have."""
    skipped = np.maximum(last + 1 - kept, 0)
    return skipped, low_bits(np.maximum(kept, 1), skipped)


def sizes_from(universe: np.ndarray, kept: np.ndarray, last: np.ndarray, quotients: np.ndarray) -> IndexSizes:
    """The same, once it is known how many positions are kept, where the last one is, and the sum of gap >> low."""
    skipped, low = rice_of(kept, last)
    rice = rice_size(np.maximum(kept, 1), low, np.where(low > 0, quotients, skipped))
    best = np.minimum(rice, packed_size(universe, 1))
    return IndexSizes(np.where((kept == 0) | (kept == universe), 0, best), kept)


def quotient_sums(places: Tensor, start: Tensor, upto: Tensor, kept: Tensor, low: Tensor) -> Tensor:
    """Per universe, the sum of gap >> low."""
    gaps = places.diff(prepend=places.new_full((1,), -1)) - 1
    first = (upto - kept)[kept > 0]
    gaps[first] = places[first] - start[kept > 0]
    summed = torch.nn.functional.pad((gaps >> low.repeat_interleave(kept)).cumsum(0), (1, 0))
    return summed[upto] - summed[upto - kept]
