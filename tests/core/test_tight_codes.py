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
from sparing.wire import frequencies, index, rans, tight_index, tight_values
from sparing.wire.index import Reader, varint
from sparing.wire.levels import class_of_kept, half_octaves, octaves, row_of, tally
from support import plain_bodies

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

STEEP = np.repeat(rows("0 5"), 64)
STEEP[70] = 4

# ------------------------------------------------------------------------------------------------------ golden bytes

INDICES = [
    ("00", at(3, 0, 1, 2), None),
    ("030702033811", at(1000, 3, 500), None),
    ("04 02 03340323 02 1200 30", at(1000, 3, 500), None),  # two kept; a head; a state of two bytes; six low bits
    ("05 03170004 05 0a3741254d 00 02 06 02 0000", CROSS, 8),  # 16 levels; four classes: 0, 2, 6 and 2 kept, no gaps
    ("05 02180007 06 0d508e3a4447 00 02 06 02 0000", CROSS, 8),  # the same with finer levels
    ("05 00 01 40" + " 00" * 2, np.ones(64, bool), 8),  # all levels 1: one class of 64, no gaps
]
CODES = [
    ("0001", rows(), None),
    ("00 03 f808", rows("0 -1 3 -4"), None),
    ("00 04 f0c3", rows("0 -1 3 -4"), None),  # wider than it need be
    ("01 000a", rows("5 " * 100), None),
    ("01 02140004 03 01ee50", rows("0 1 0 -1 0 0 0 2"), None),
    ("02 0000 010aff404000807c 02 3eac", STEEP, 64),  # two rows, two tables
    ("03 031e0007 06 560a29556b47 020f0003 09 0140125e665b939634", WAVES, 8),
    ("05 03 03 02 2f 05 00 03 29", at(40, 7) * np.int8(1) - at(40, 21) * np.int8(3), None),
]


@pytest.mark.parametrize(("golden", "bits", "columns"), INDICES)
def test_golden_indices(golden: str, bits: np.ndarray, columns: int | None) -> None:
    data = bytes.fromhex(golden)
    assert slow.index(slow.Bytes(data), len(bits), columns) == bits.tolist()
    reader = Reader(memoryview(data))
    assert (tight_index.decode_tight_index(reader, len(bits), columns) == bits).all()
    assert not reader.left


@pytest.mark.parametrize(("golden", "sent", "columns"), CODES)
def test_golden_codes(golden: str, sent: np.ndarray, columns: int | None) -> None:
    data = bytes.fromhex(golden)
    assert slow.codes(slow.Bytes(data), len(sent), columns) == sent.tolist()
    reader = Reader(memoryview(data))
    assert tight_values.decode_tight_values(reader, len(sent), columns).tolist() == sent.tolist()
    assert not reader.left


def test_what_is_written() -> None:
    kept, symbols = np.flatnonzero(CROSS), tight_values.zigzag(WAVES)
    for pieces, (golden, *_) in (
        (tight_index.gaps_way([np.array([3, 500])], b"\x04")[1](), INDICES[2]),
        (tight_index.classes_way(kept, 8, 8, octaves)[1](), INDICES[3]),
        (tight_index.classes_way(kept, 8, 8, half_octaves)[1](), INDICES[4]),
        (tight_values.write_packed(rows("0 -1 3 -4")), CODES[1]),
        (tight_values.rans_way(1, tight_values.zigzag(rows("0 1 0 -1 0 0 0 2")), None)[1](), CODES[4]),
        (tight_values.rans_way(2, tight_values.zigzag(STEEP), row_of(128, 64, None))[1](), CODES[5]),
        (tight_values.row_sums_way(symbols, 8)[1](), CODES[6]),
        (tight_values._sparse_way(CODES[7][1], None)[1](), CODES[7]),
    ):
        assert b"".join(pieces).hex() == golden.replace(" ", "")


@pytest.mark.parametrize("golden", ["04 030a0103 03 60ad9b", "02 030a0103 03 60ad9b"])
def test_golden_codes_of_kept_positions(golden: str) -> None:
    """Two sorts of contexts, so few symbols that all share a table."""
    kept = WAVES != 0
    data = bytes.fromhex(golden)
    assert slow.codes(slow.Bytes(data), int(kept.sum()), 8, kept.tolist()) == WAVES[kept].tolist()
    assert (
        tight_values.decode_tight_values(Reader(memoryview(data)), int(kept.sum()), 8, kept).tolist()
        == WAVES[kept].tolist()
    )
    contexts = class_of_kept(kept, 8) if data[0] == tight_values.KNOWN else row_of(int(kept.sum()), 8, kept)
    assert b"".join(tight_values.rans_way(data[0], tight_values.zigzag(WAVES[kept]), contexts)[1]()) == data


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("data", "u", "columns", "why"),
    [
        ("06", 64, 8, "index code 6"),
        ("05", 64, None, "index code 5 for 64 positions in no columns"),
        ("05", 64, 4, "index code 5"),
        ("", 64, 8, "index code needs 1 bytes"),
        ("04 41", 64, None, "positions kept in classes"),
        ("04 02 00 40 00", 10, None, "a gap of 65536 or more"),
        ("04 02 00 08", 10, None, "position 17 of 10"),
        ("04 02 03340323 02 1200 70", 1000, None, "padding after low bits"),
        ("04 02 03340323 02 1200", 1000, None, "low bits needs 1 bytes"),
        ("04 02 03350323 02 1200 30", 1000, None, "not used up"),
        ("04 02 03340323 05 1200000000 30", 1000, None, "not used up"),
        ("04 02 03340323 02 1300 30", 1000, None, "not used up"),
        ("04 02 04340323", 1000, None, "chances of kind 4"),
        ("04 02 03800323", 1000, None, "chances of steepness 128"),
        ("04 02 03342323", 1000, None, "from 35 to 35"),
        ("05 00 40", 64, 8, "a level of 64"),
    ],
)
def test_bad_indices(data: str, u: int, columns: int | None, why: str) -> None:
    with pytest.raises(WireError, match=why):
        tight_index.decode_tight_index(Reader(memoryview(bytes.fromhex(data))), u, columns)


@pytest.mark.parametrize(
    ("data", "n", "columns", "why"),
    [
        ("06", 4, None, "value code 6"),
        ("02", 64, None, "value code 2 for 64 codes in no columns"),
        ("02", 65, 8, "value code 2"),
        ("02", 8, 8, "value code 2"),
        ("02", 257, 1, "value code 2"),
        ("03", 64, None, "value code 3 for 64 codes in no columns"),
        ("04", 64, 8, "value code 4"),
        ("00 00", 4, None, "codes of 0 bits"),
        ("00 09", 4, None, "codes of 9 bits"),
        ("00 03 f818", 4, None, "padding after codes"),
        ("05 00 05", 4, None, "sparse codes in sparse codes"),
        ("01 01", 4, None, "last symbol needs 1 bytes"),
        ("01 01 01 ffff", 4, None, "chances add up to"),
        ("01 01 01 000000", 4, None, "the chance of symbol 0"),
    ],
)
def test_bad_codes(data: str, n: int, columns: int | None, why: str) -> None:
    with pytest.raises(WireError, match=why):
        tight_values.decode_tight_values(Reader(memoryview(bytes.fromhex(data))), n, columns)


def long_and_dear() -> tuple[np.ndarray, bytes, int]:
    """Symbols that are dealt out to lanes, their bytes, and where the states begin."""
    symbols = np.random.default_rng(0).normal(100, 40, 20_000).clip(0, 255).astype(np.uint8)
    plan = rans.plan_rans(symbols)
    assert plan.lanes >= rans.FEWEST
    return symbols, rans.write_rans(plan, symbols, None), len(plan.heads) + len(varint(plan.lanes))


def test_bad_lanes() -> None:
    symbols, data, at = long_and_dear()
    bad = bytearray(data)
    bad[at + 2 : at + 4] = bytes(2)
    for broken, why in ((bad, "a state of"), (data[:-2], "words end"), (data[: at + 3], "states needs")):
        with pytest.raises(WireError, match=why):
            rans.decode_rans(Reader(memoryview(bytes(broken))), len(symbols))
    bad = bytearray(data)
    bad[at] ^= 1
    with pytest.raises(WireError, match=r"not used up|words end"):
        rans.decode_rans(Reader(memoryview(bytes(bad))), len(symbols))


@pytest.mark.parametrize(
    ("n", "lanes", "why"),
    [
        (20_000, 1025, "1025 lanes for 20000 symbols"),
        (20_000, 1, "1 lanes for 20000 symbols"),  # 10,000 steps and more
        ((1 << 18) + 1, 0, "0 lanes for 262145 symbols"),
        (1 << 24, 1023, "1023 lanes"),
        (20_000, 2, "states needs 8 bytes"),
        (1 << 24, 1024, "states needs 4096 bytes"),
        (1 << 18, 0, "number of bytes needs 1 bytes"),
    ],
)
def test_lanes_are_neither_too_few_nor_too_many(n: int, lanes: int, why: str) -> None:
    with pytest.raises(WireError, match=why):
        rans.decode_rans(Reader(memoryview(bytes.fromhex("02140004") + varint(lanes))), n)


def test_states_must_be_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same symbols from states that began elsewhere."""
    symbols, data, _ = long_and_dear()
    assert (rans.decode_rans(Reader(memoryview(data)), len(symbols)) == symbols).all()
    with plain_bodies():
        monkeypatch.setattr(rans, "LOW", rans.LOW + 5)
        data = rans.encode_rans(symbols)
        monkeypatch.undo()
    with pytest.raises(WireError, match="states that are not used up"):
        rans.decode_rans(Reader(memoryview(data)), len(symbols))


def test_cheap_symbols_take_few_lanes() -> None:
    """However many they are: lanes cost bytes."""
    symbols = np.zeros(250_000, np.uint8)
    assert len(rans.encode_rans(symbols)) == 2
    symbols[::50_000] = 1
    assert rans.plan_rans(symbols).lanes == 0
    assert len(rans.encode_rans(symbols)) < 64
    many = np.tile(symbols, 20)
    assert rans.plan_rans(many).lanes == len(many) >> 13
    assert len(rans.encode_rans(many)) < 4 * (len(many) >> 13) + 200


def test_a_wrong_guess_costs_nothing() -> None:
    exact: tight_index.Way = (3, lambda: [b"abc"])
    assert tight_index.shortest_way(exact, [(2, lambda: [b"long", b"er"])])[1]() == [b"abc"]
    assert tight_index.shortest_way(exact, [(2, lambda: [b"a", b"b"])])[1]() == [b"a", b"b"]


# ----------------------------------------------------------------------------------------------------------- damage

Read = Callable[[Reader], np.ndarray]
Case = tuple[bytes, Read, Callable[[slow.Bytes], list], int]


def cases() -> list[Case]:
    """Bytes, how they are read, how the second decoder reads them, and the memory that reading may take."""
    rng, out = np.random.default_rng(0), []
    for side in (8, 20, 60):
        rough = np.exp(1.5 * (rng.normal(size=(side, 1)) + rng.normal(size=side)))
        for scale in (0.02, 0.4, 3.0):
            sent = np.clip(np.round(scale * rough * rng.normal(size=(side, side))), -128, 127).astype(np.int8).ravel()
            out += cases_of(sent, side) if sent.any() else []
    noise = np.clip(np.round(rng.normal(0, 40, size=12_000)), -128, 127).astype(np.int8)
    return out + cases_of(noise, None)


def cases_of(sent: np.ndarray, columns: int | None) -> list[Case]:
    alive, n = sent != 0, len(sent)
    some = sent[alive]
    room = 4 * n + ROOM
    kept, symbols = np.flatnonzero(alive), tight_values.zigzag(sent)
    indices = [index.encode_index(alive), tight_index.gaps_way([kept], b"\x04")[1]()]
    whole = [
        tight_values.write_packed(sent),
        tight_values.rans_way(1, symbols, None)[1](),
        tight_values._sparse_way(sent, columns)[1](),
    ]
    parts = [tight_values.encode_tight_values(some, columns, alive)]
    if columns:
        indices += [tight_index.classes_way(kept, n // columns, columns, how)[1]() for how in (octaves, half_octaves)]
        whole += [
            tight_values.row_sums_way(symbols, columns)[1](),
            tight_values.rans_way(2, symbols, row_of(n, columns, None))[1](),
        ]
        parts.append(tight_values.rans_way(4, tight_values.zigzag(some), class_of_kept(alive, columns))[1]())
    out: list[Case] = []
    for data in map(b"".join, indices):
        out.append(
            (data, lambda r: tight_index.decode_tight_index(r, n, columns), lambda d: slow.index(d, n, columns), room)
        )
    for data in map(b"".join, whole):
        out.append(
            (
                data,
                lambda r: tight_values.decode_tight_values(r, n, columns),
                lambda d: slow.codes(d, n, columns),
                2 * room,
            )
        )
    for data in map(b"".join, parts):
        read: Read = lambda r: tight_values.decode_tight_values(r, len(some), columns, alive)  # noqa: E731
        out.append((data, read, lambda d: slow.codes(d, len(some), columns, alive.tolist()), 2 * room))
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


@pytest.mark.slow
def test_damage_is_refused_or_is_another_message() -> None:
    """What is accepted, the second decoder reads as well, and from as many bytes."""
    pool, rng = cases(), random.Random(0)
    refused = accepted = 0
    tracemalloc.start()
    for number in range(400):
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
        rest = slow.Bytes(bad)
        assert again(rest) == got.tolist()
        assert len(rest.data) == reader.left
    tracemalloc.stop()
    assert refused > 250
    assert accepted > 25


@pytest.mark.parametrize("code", [4, 5])
@pytest.mark.parametrize("level", [1, 31])
def test_a_few_bytes_that_mean_everything_take_no_more_memory_than_the_mask(code: int, level: int) -> None:
    side = 2000
    u = side * side
    data = bytes([code, *([0, level] * 2 if code == 5 else [])]) + varint(u) + bytes(2)
    tracemalloc.start()
    bits = tight_index.decode_tight_index(Reader(memoryview(data)), u, side)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert bits.all()
    assert peak < 4 * u + ROOM


def test_a_state_is_never_longer_than_its_symbols_can_make_it() -> None:
    longest = np.arange(255, dtype=np.uint8)  # chances of 1 in 2^8 take a byte each
    data, heads = rans.encode_rans(longest), len(rans.plan_rans(longest).heads)
    assert data[heads : heads + 2] == varint(255)
    assert (rans.decode_rans(Reader(memoryview(data)), 255) == longest).all()
    with pytest.raises(WireError, match="a state that is not used up"):
        rans.decode_rans(Reader(memoryview(data[:heads] + varint(256) + data[heads + 2 :] + b"\x01")), 255)


def test_a_long_state_takes_no_memory() -> None:
    n = 8 << 20
    data = bytes.fromhex("01 02140004") + varint(n) + b"\x01" * n

    def refuse() -> None:
        with pytest.raises(WireError, match="a state that is not used up"):
            tight_values.decode_tight_values(Reader(memoryview(data)), 100, None)

    refuse()  # compiles
    tracemalloc.start()
    refuse()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_rows_are_gone_through_once_for_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks of gaps there are: time is linear."""
    calls, real = [], tight_index.class_ends
    monkeypatch.setattr(tight_index, "class_ends", lambda g, kind: calls.append(kind) or real(g, kind))
    rows, columns = 20_000, 17
    data = bytes([5, 0, 1, 0, 1]) + varint(rows * columns) + bytes(2)
    assert tight_index.decode_tight_index(Reader(memoryview(data)), rows * columns, columns).all()
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
    data = b"".join(tight_values.row_sums_way(tight_values.zigzag(sent), 600)[1]())
    tight_values.decode_tight_values(Reader(memoryview(data)), len(sent), 600)  # compiles
    tracemalloc.start()
    got = tight_values.decode_tight_values(Reader(memoryview(data)), len(sent), 600)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (got == sent).all()
    assert peak < 8 * len(sent) + ROOM


# ---------------------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(("n", "slack"), [(500, 0.15), (3000, 0.06), (50_000, 0.03), (1_000_000, 0.02)])
@pytest.mark.parametrize("sigma", [0.5, 2.0, 8.0])
def test_close_to_the_entropy(n: int, slack: float, sigma: float) -> None:
    drawn = np.round(np.random.default_rng(0).normal(0, sigma, n)).astype(np.int8)
    counts = np.unique(drawn, return_counts=True)[1]
    entropy = float((counts * np.log2(n / counts)).sum()) / 8
    assert len(b"".join(tight_values.encode_tight_values(drawn, None))) < (1 + slack) * entropy


def test_rows_of_their_own_strength_pay() -> None:
    rng = np.random.default_rng(0)
    drawn = np.round(np.array([[40], [10], [3], [1]]) * rng.normal(size=(4, 300))).clip(-127, 127).astype(np.int8)
    kept = np.repeat([True, False, True, True], 300)
    for sent, mask in ((drawn.ravel(), None), (drawn.ravel()[kept], kept)):
        ours, blind = (b"".join(tight_values.encode_tight_values(sent, columns, mask)) for columns in (300, None))
        assert ours[0] == tight_values.ROWS
        assert len(ours) < 0.93 * len(blind)


def test_clusters_pay() -> None:
    rng = np.random.default_rng(0)
    rough = np.exp(1.5 * (rng.normal(size=(300, 1)) + rng.normal(size=400)))
    bits = (rng.random((300, 400)) < 0.003 * rough).ravel()
    whole, flat = (len(b"".join(tight_index.encode_tight_index(bits, columns))) for columns in (400, None))
    assert whole < 0.85 * flat
    drawn = np.clip(np.round(0.3 * rough * rng.normal(size=rough.shape)), -127, 127).astype(np.int8).ravel()
    assert len(b"".join(tight_values.encode_tight_values(drawn, 400))) < 0.75 * len(
        b"".join(tight_values.encode_tight_values(drawn, None))
    )
    kept = drawn != 0
    known, blind = (
        tight_values.encode_tight_values(drawn[kept], 400, kept),
        tight_values.encode_tight_values(drawn[kept], None),
    )
    assert len(b"".join(known)) < 0.9 * len(b"".join(blind))


def test_next_to_nothing() -> None:
    for sent in (rows(), rows("0 " * 5000), rows("-7 " * 5000)):
        assert len(b"".join(tight_values.encode_tight_values(sent, None))) <= 3


def test_every_array_names_its_type() -> None:
    """Whole numbers are 32 bits wide by default on some machines."""
    at = {"array": 1, "zeros": 1, "ones": 1, "empty": 1, "full": 2, "arange": 9}  # arguments before the type
    for file in Path(rans.__file__).parent.glob("*.py"):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(call, ast.Call)
                and (name := ast.unparse(call.func)).removeprefix("np.") in at
                and "np." in name
            ):
                named = len(call.args) > at[name[3:]] or any(word.arg == "dtype" for word in call.keywords)
                assert named, f"{file.name}, line {call.lineno}: {ast.unparse(call)}"


def test_levels_end_below_64() -> None:
    assert half_octaves(np.array([(1 << 31) - 1, 1 << 38], np.int64)).tolist() == [62, 62]


def test_logarithms_are_close() -> None:
    x = np.array([1, 2, 3, 1023, 1025, 4095, 8191, 10**6 + 7, 2**40 + 1])
    assert np.abs(frequencies.log2(x) / 4096 - np.log2(x)).max() < 0.0018
