"""Tight codes: golden bytes, every refusal, damage, the memory cap, and how close they come to the entropy."""

import ast
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from reference import tight_codes as slow
from sparing.core.errors import WireError
from sparing.core.wire import ans, chances, codes, index, places
from sparing.core.wire.grid import class_of_kept, tally
from sparing.core.wire.index import Reader, varint

ROOM = 4 << 20


def at(n: int, *kept: int) -> np.ndarray:
    bits = np.zeros(n, bool)
    bits[list(kept)] = True
    return bits


def rows(*lines: str) -> np.ndarray:
    return np.array([int(x) for line in lines for x in line.split()], np.int8)


CROSS = (
    rows(*["0 0 0 0 0 0 0 0"] * 2, "1 1 1 1 1 1 1 1", *["0 0 0 0 0 0 0 0"] * 2, "0 1 0 0 0 0 1 0", *["0 " * 8] * 2) > 0
)
WAVES = rows(*["0 0 1 0 0 0 0 0"] * 3, "1 -1 1 0 0 1 0 -2", *["0 0 1 0 0 0 0 0"] * 4)

# ------------------------------------------------------------------------------------------------------ golden bytes

INDICES = [
    ("00", at(3, 0, 1, 2), None),
    ("030702033811", at(1000, 3, 500), None),
    ("04 02 04340323 02 0012 30", at(1000, 3, 500), None),  # two kept; a head; a number of two bytes; six low bits
    ("05 04160001 04 56678101 0a 03110004 02 51f8", CROSS, 8),  # a head, 16 levels in a number; 10 of one class
    ("06 04170004 05 4b393d370a 00 02 06 02 0000", CROSS, 8),  # four classes: 0, 2, 6 and 2 kept, no gaps
    ("07 021a0007 06 1766a2fed902 00 02 06 02 0000", CROSS, 8),
]
CODES = [
    ("0001", rows(), None),
    ("00 03 f808", rows("0 -1 3 -4"), None),
    ("01 000a", rows("5 " * 100), None),
    ("01 03140004 03 50ee01", rows("0 1 0 -1 0 0 0 2"), None),
    ("02 021b0007 06 6a67f4ccb20e 030f0003 09 aea2b758786f114001", WAVES, 8),
    ("04 03 03 02 2f 05 00 03 29", at(40, 7) * np.int8(1) - at(40, 21) * np.int8(3), None),
]


@pytest.mark.parametrize(("golden", "bits", "columns"), INDICES)
def test_golden_indices(golden: str, bits: np.ndarray, columns: int | None) -> None:
    data = bytes.fromhex(golden)
    assert slow.index(slow.Bytes(data), len(bits), columns) == bits.tolist()
    reader = Reader(memoryview(data))
    assert (places.decode(reader, len(bits), columns) == bits).all()
    assert not reader.left
    assert rewritten_index(data, bits, columns) == data


@pytest.mark.parametrize(("golden", "sent", "columns"), CODES)
def test_golden_codes(golden: str, sent: np.ndarray, columns: int | None) -> None:
    data = bytes.fromhex(golden)
    assert slow.codes(slow.Bytes(data), len(sent), columns) == sent.tolist()
    assert codes.decode(Reader(memoryview(data)), len(sent), columns).tolist() == sent.tolist()
    assert rewritten_codes(data, sent, columns, None) == data


def test_golden_codes_of_kept_positions() -> None:
    kept = WAVES != 0
    data = bytes.fromhex("03 040a0103 03 9bad60")
    assert slow.codes(slow.Bytes(data), int(kept.sum()), 8, kept.tolist()) == WAVES[kept].tolist()
    assert codes.decode(Reader(memoryview(data)), int(kept.sum()), 8, kept).tolist() == WAVES[kept].tolist()


def rewritten_index(data: bytes, bits: np.ndarray, columns: int | None) -> bytes:
    """The same positions by the same code."""
    kept, code = np.flatnonzero(bits), data[0]
    if code < places.GAPS:
        return b"".join(index.encode(bits))
    if code == places.GAPS:
        return b"".join(places.gaps_way([kept], data[:1])[1]())
    assert columns
    if not len(kept):  # never written: the heads of the levels, and no class
        return bytes([code]) + ans.encode(np.zeros(columns + len(bits) // columns, np.uint8))
    return b"".join(places.classes_way(kept, len(bits) // columns, columns, (code,))[1]())


def rewritten_codes(data: bytes, sent: np.ndarray, columns: int | None, kept: np.ndarray | None) -> bytes:
    code, symbols = data[0], codes.zigzag(sent)
    if code == codes.PACKED:
        return b"".join(codes.write_packed(sent))
    if code == codes.TOLD:
        assert columns
        return b"".join(codes.told(symbols, columns)[1]())
    if code == codes.SPARSE:
        alive, columns = sent != 0, columns if kept is None else None
        reader = Reader(memoryview(data))
        reader.at = 1
        places.decode(reader, len(sent), columns)
        where, values = data[1 : reader.at], data[reader.at :]
        return data[:1] + rewritten_index(where, alive, columns) + rewritten_codes(values, sent[alive], columns, alive)
    contexts = class_of_kept(kept, columns) if code == codes.KNOWN and kept is not None and columns else None
    return b"".join(codes.coded(code, symbols, contexts)[1]())


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("data", "u", "columns", "why"),
    [
        ("08", 64, 8, "index code 8"),
        ("05", 64, None, "index code 5 for 64 positions in no columns"),
        ("05", 64, 4, "index code 5"),
        ("", 64, 8, "index code needs 1 bytes"),
        ("04 41", 64, None, "positions kept in classes"),
        ("04 02 00 40 00", 10, None, "a gap of 65536 or more"),
        ("04 02 00 08", 10, None, "position 17 of 10"),
        ("04 02 04340323 02 0012 70", 1000, None, "padding after low bits"),
        ("04 02 04340323 02 0012", 1000, None, "low bits needs 1 bytes"),
        ("04 02 04350323 02 0012 30", 1000, None, "(not used up|not those of the symbols)"),
        ("04 02 04340323 03 001200 30", 1000, None, "a number of 3 bytes"),
        ("04 02 04340323 02 1200 30", 1000, None, "a number of 2 bytes whose last is zero"),
        ("04 02 04340323 02 0112 30", 1000, None, "(not used up|not those of the symbols|gap)"),
        ("04 02 05340323", 1000, None, "chances of kind 5"),
        ("04 02 04800323", 1000, None, "chances of steepness 128"),
        ("04 02 04342323", 1000, None, "from 35 to 35"),
        ("05 00 80", 64, 8, "a level of 128"),
        ("05 00 02", 64, 8, "levels above those of a full matrix"),
        ("06 00 05 00 03", 800, 8, "levels above those of a full matrix"),  # 100 rows, 8 columns
        ("06 00 04 00 08", 800, 8, "levels above those of a full matrix"),
        ("06 00 04 00 07 01 00 00", 800, 8, "levels that are not those of the positions"),
        ("05 00 01 02 00 00", 64, 8, "levels that are not those of the positions"),
    ],
)
def test_bad_indices(data: str, u: int, columns: int | None, why: str) -> None:
    with pytest.raises(WireError, match=why):
        places.decode(Reader(memoryview(bytes.fromhex(data))), u, columns)


@pytest.mark.parametrize(
    ("data", "n", "columns", "why"),
    [
        ("05", 4, None, "value code 5"),
        ("02", 64, None, "value code 2 for 64 codes in no columns"),
        ("03", 64, 8, "value code 3"),
        ("00 00", 4, None, "codes of 0 bits"),
        ("00 09", 4, None, "codes of 9 bits"),
        ("00 04 0100", 4, None, "that need 2"),
        ("00 03 f818", 4, None, "padding after codes"),
        ("04 00 04", 4, None, "sparse codes in sparse codes"),
        ("04 00 01 00 00", 4, None, "a zero among codes"),
        ("02 00 00 00 02", 64, 8, "levels that are not those of the codes"),
        ("01 01", 4, None, "last symbol needs 1 bytes"),
        ("01 01 01 ffff", 4, None, "chances add up to"),
        ("01 01 01 000000", 4, None, "the chance of symbol 0"),
    ],
)
def test_bad_codes(data: str, n: int, columns: int | None, why: str) -> None:
    with pytest.raises(WireError, match=why):
        codes.decode(Reader(memoryview(bytes.fromhex(data))), n, columns)


def test_bad_lanes() -> None:
    symbols = np.random.default_rng(0).geometric(0.3, 20_000).astype(np.uint8)
    data = ans.encode(symbols)
    head = len(ans.plan(symbols).heads)
    bad = bytearray(data)
    bad[head + 2 : head + 4] = bytes(2)
    for broken, why in ((bad, "a state of"), (data[:-2], "words end"), (data[: head + 3], "states needs")):
        with pytest.raises(WireError, match=why):
            ans.decode(Reader(memoryview(bytes(broken))), len(symbols))
    bad = bytearray(data)
    bad[-1] ^= 1
    with pytest.raises(WireError, match=r"not used up|not those of the symbols|words end"):
        ans.decode(Reader(memoryview(bytes(bad))), len(symbols))


@pytest.mark.parametrize("wrong", ["nothing", "head", "held", "tail"])
def test_states_must_be_used_up(wrong: str) -> None:
    """The same symbols from states that began elsewhere."""
    symbols = np.zeros(20_000, np.uint8)
    symbols[:15_000] = np.random.default_rng(0).geometric(0.3, 15_000)  # the tail has no words for the head's states
    plan = ans.plan(symbols)
    lanes = ans.lanes_of(plan)
    split = len(symbols) - lanes.after
    first, last = np.full(lanes.head, ans.LOW), np.full(lanes.tail, ans.LOW)
    last[0] += 5 * (wrong == "tail")
    tail, words = ans.run(plan, last, symbols[split:], None)
    assert len(words) < lanes.head
    first[: len(words)] += words
    first[0] += (wrong == "head") << 16
    first[-1] += wrong == "held"
    head, words = ans.run(plan, first, symbols[:split], None)
    data = plan.heads + np.concatenate([head, tail]).astype("<u4").tobytes() + words.astype("<u2").tobytes()
    if wrong == "nothing":
        assert data == ans.encode(symbols)
        return
    with pytest.raises(WireError, match="states that are not used up"):
        ans.decode(Reader(memoryview(data)), len(symbols))


@pytest.mark.parametrize("gaps", [[0] * 8, [0] + [7] * 7], ids=["one row", "one column"])
def test_levels_are_checked_on_both_sides(gaps: list[int]) -> None:
    data = bytes([5, 0, 1, 8]) + ans.encode(np.array(gaps, np.uint8))
    with pytest.raises(WireError, match="levels that are not those of the positions"):
        places.decode(Reader(memoryview(data)), 64, 8)


def test_a_wrong_guess_costs_nothing() -> None:
    exact: places.Way = (3, lambda: [b"abc"])
    assert places.shortest(exact, [(2, lambda: [b"long", b"er"])])[1]() == [b"abc"]
    assert places.shortest(exact, [(2, lambda: [b"a", b"b"])])[1]() == [b"a", b"b"]


# ----------------------------------------------------------------------------------------------------------- damage

Case = tuple[bytes, Callable[[Reader], np.ndarray], Callable[[bytes, np.ndarray], bytes], int]


def cases() -> list[Case]:
    """Bytes, how they are read, how what was read is written again, and the memory that reading may take."""
    rng, out = np.random.default_rng(0), []
    for side in (8, 20, 60):
        rough = np.exp(1.5 * (rng.normal(size=(side, 1)) + rng.normal(size=side)))
        for scale in (0.02, 0.4, 3.0):
            sent = np.clip(np.round(scale * rough * rng.normal(size=(side, side))), -128, 127).astype(np.int8).ravel()
            out += cases_of(sent, side) if sent.any() else []
    noise = np.clip(np.round(rng.normal(size=12_000)), -9, 9).astype(np.int8)
    return out + cases_of(noise, None)


def cases_of(sent: np.ndarray, columns: int | None) -> list[Case]:
    alive, n = sent != 0, len(sent)
    some = sent[alive]
    room = 4 * n + ROOM
    kept, symbols = np.flatnonzero(alive), codes.zigzag(sent)
    indices = [index.encode(alive), places.gaps_way([kept], b"\x04")[1]()]
    whole = [codes.write_packed(sent), codes.coded(1, symbols, None)[1](), codes.sparse(sent, columns)[1]()]
    parts = [codes.encode(some, columns, alive)]
    if columns:
        indices += [places.classes_way(kept, n // columns, columns, (code,))[1]() for code in (5, 6, 7)]
        whole.append(codes.told(symbols, columns)[1]())
        parts.append(codes.coded(3, codes.zigzag(some), class_of_kept(alive, columns))[1]())
    out: list[Case] = []
    for data in map(b"".join, indices):
        out.append((data, lambda r: places.decode(r, n, columns), lambda d, x: rewritten_index(d, x, columns), room))
    for data in map(b"".join, whole):
        again: Callable[[bytes, np.ndarray], bytes] = lambda d, x: rewritten_codes(d, x, columns, None)  # noqa: E731
        out.append((data, lambda r: codes.decode(r, n, columns), again, 2 * room))
    for data in map(b"".join, parts):
        again = lambda d, x: rewritten_codes(d, x, columns, alive)  # noqa: E731
        out.append((data, lambda r: codes.decode(r, len(some), columns, alive), again, 2 * room))
    return out


def damaged(rng: random.Random, data: bytes, other: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        where = rng.randrange(min(len(out), 24) if rng.random() < 0.6 else len(out)) if out else 0
        kind = rng.randrange(5)
        if kind == 0 and out:
            out[where] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[where] = rng.choice((0, 1, 2, 3, 4, 127, 128, 255))
        elif kind == 2:
            del out[where : where + rng.choice((1, 2, 9))]
        elif kind == 3:
            out[where:where] = rng.randbytes(rng.choice((1, 2, 9)))
        else:
            out[where : where + 8] = other[where : where + 8]
    return bytes(out)


def test_damage_is_refused_or_is_another_message() -> None:
    pool, rng = cases(), random.Random(0)
    refused = accepted = 0
    tracemalloc.start()
    for number in range(1500):
        data, read, again, room = pool[number % len(pool)]
        bad = damaged(rng, data, rng.choice(pool)[0])
        reader = Reader(memoryview(bad))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            got = read(reader)
        except WireError:
            refused += 1
            continue
        finally:
            assert tracemalloc.get_traced_memory()[1] - before < room
        accepted += 1
        assert again(bad[: reader.at], got) == bad[: reader.at]
    tracemalloc.stop()
    assert refused > 1000
    assert accepted > 20


@pytest.mark.parametrize("code", [4, 5, 6, 7])
def test_a_few_bytes_that_mean_everything_take_no_more_memory_than_the_mask(code: int) -> None:
    side = 2000
    u = side * side
    data = bytes([4]) + varint(u) + bytes(2)
    if code > 4:
        level = {5: 1, 6: side.bit_length(), 7: (side * side).bit_length()}[code]
        data = bytes([code]) + bytes([0, level] * 2) + varint(u) + bytes(2)
    tracemalloc.start()
    bits = places.decode(Reader(memoryview(data)), u, side)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bits.all()
    assert peak < 4 * u + ROOM


def test_a_number_is_never_longer_than_its_symbols_can_make_it() -> None:
    longest = np.arange(255, dtype=np.uint8)  # chances of 1 in 2^8 take a byte each
    data, heads = ans.encode(longest), len(ans.plan(longest).heads)
    assert data[heads : heads + 2] == varint(255)
    assert (ans.decode(Reader(memoryview(data)), 255) == longest).all()
    with pytest.raises(WireError, match="a number of 256 bytes for 255 symbols"):
        ans.decode(Reader(memoryview(data[:heads] + varint(256) + data[heads + 2 :] + b"\x01")), 255)


def test_a_long_number_takes_no_memory() -> None:
    n = 8 << 20
    data = bytes.fromhex("01 03140004") + varint(n) + b"\x01" * n
    tracemalloc.start()
    with pytest.raises(WireError, match=f"a number of {n} bytes for 100 symbols"):
        codes.decode(Reader(memoryview(data)), 100, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_rows_are_gone_through_once_for_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks of gaps there are: time is linear."""
    calls, real = [], places.ends
    monkeypatch.setattr(places, "ends", lambda g, kind: calls.append(kind) or real(g, kind))
    rows, columns = 20_000, 17
    data = bytes([5, 0, 1, 0, 1]) + varint(rows * columns) + bytes(2)
    assert places.decode(Reader(memoryview(data)), rows * columns, columns).all()
    assert calls == [2]


@pytest.mark.parametrize("places", [[], [3], [9, 9, 8], [0, 9], [2, 2, 3, 4, 4, 4], list(range(10)) * 2])
def test_tally(places: list[int]) -> None:
    counts = np.ones(10, np.int64)
    tally(counts, np.array(places, np.int64))
    assert counts.tolist() == [1 + places.count(i) for i in range(10)]


def test_many_tables_take_little_memory() -> None:
    rng = np.random.default_rng(0)
    rough = np.exp(3 * (rng.normal(size=(600, 1)) + rng.normal(size=600)))
    sent = np.clip(np.round(rough * rng.normal(size=(600, 600))), -128, 127).astype(np.int8).ravel()
    data = b"".join(codes.told(codes.zigzag(sent), 600)[1]())
    tracemalloc.start()
    got = codes.decode(Reader(memoryview(data)), len(sent), 600)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (got == sent).all()
    assert peak < 8 * len(sent) + ROOM


# ---------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(("n", "slack"), [(500, 0.15), (3000, 0.06), (50_000, 0.025), (1_000_000, 0.012)])
@pytest.mark.parametrize("sigma", [0.5, 2.0, 8.0])
def test_close_to_the_entropy(n: int, slack: float, sigma: float) -> None:
    drawn = np.round(np.random.default_rng(0).normal(0, sigma, n)).astype(np.int8)
    counts = np.unique(drawn, return_counts=True)[1]
    entropy = float((counts * np.log2(n / counts)).sum()) / 8
    assert len(b"".join(codes.encode(drawn, None))) < (1 + slack) * entropy


def test_clusters_pay() -> None:
    rng = np.random.default_rng(0)
    rough = np.exp(1.5 * (rng.normal(size=(300, 1)) + rng.normal(size=400)))
    bits = (rng.random((300, 400)) < 0.003 * rough).ravel()
    whole, flat = (len(b"".join(places.encode(bits, columns))) for columns in (400, None))
    assert whole < 0.85 * flat
    drawn = np.clip(np.round(0.3 * rough * rng.normal(size=rough.shape)), -127, 127).astype(np.int8).ravel()
    assert len(b"".join(codes.encode(drawn, 400))) < 0.75 * len(b"".join(codes.encode(drawn, None)))
    kept = drawn != 0
    known, blind = codes.encode(drawn[kept], 400, kept), codes.encode(drawn[kept], None)
    assert len(b"".join(known)) < 0.9 * len(b"".join(blind))


def test_next_to_nothing() -> None:
    for sent in (rows(), rows("0 " * 5000), rows("-7 " * 5000)):
        assert len(b"".join(codes.encode(sent, None))) <= 3


def test_every_array_names_its_type() -> None:
    """Whole numbers are 32 bits wide by default on some machines."""
    at = {"array": 1, "zeros": 1, "ones": 1, "empty": 1, "full": 2, "arange": 9}  # arguments before the type
    for file in Path(ans.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(call, ast.Call)
                and (name := ast.unparse(call.func)).removeprefix("np.") in at
                and "np." in name
            ):
                named = len(call.args) > at[name[3:]] or any(word.arg == "dtype" for word in call.keywords)
                assert named, f"{file.name}, line {call.lineno}: {ast.unparse(call)}"


def test_logarithms_are_close() -> None:
    x = np.array([1, 2, 3, 1023, 1025, 4095, 8191, 10**6 + 7, 2**40 + 1])
    assert np.abs(chances.log2(x) / 4096 - np.log2(x)).max() < 0.0018
    assert chances.log2(x).tolist() == [slow.log(int(v)) for v in x]
