"""The wire: golden bytes, every refusal, every sender's mistake, the memory cap."""

import importlib.util
import sys
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from sparing.core.errors import WireError
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.wire import dense_bytes, fingerprint, from_bytes, index, nbytes, parcel_sizes, schema_of, to_bytes
from sparing.wire.index import Reader

HEAD = 13
FUZZER = Path(__file__).parents[2] / "benchmarks" / "fuzz_wire.py"


def bools(text: str) -> torch.Tensor:
    return torch.tensor([[c == "1" for c in text]])


def at(n: int, *places: int) -> np.ndarray:
    bits = np.zeros(n, bool)
    bits[list(places)] = True
    return bits


def sealed(schema: Schema, *sections: bytes) -> bytes:
    """Bytes with a true header around sections made by hand."""
    body = b"".join(index.varint(len(s)) + s for s in sections)
    data = b"SPAR\x01" + fingerprint(schema) + index.varint(len(body)) + body
    return data + zlib.crc32(data).to_bytes(4, "little")


def resealed(data: bytes) -> bytes:
    return data[:-4] + zlib.crc32(data[:-4]).to_bytes(4, "little")


# ----------------------------------------------------------------------------------------------------- golden bytes

CODES = Leaf(
    torch.tensor([[-4, 3, 0, 0]], dtype=torch.int8), bools("1111"), (bools("1100"),), torch.ones(1, 1), 3, True
)
RICE = Leaf(torch.arange(400.0).reshape(1, 400) == 399, None, (torch.arange(400)[None] == 399,))
FILTERS = Leaf(
    torch.tensor([[[1, 0], [0, 0]]]), None, (torch.tensor([[[True], [False]]]), torch.tensor([[[True, False]]]))
)
SIGNS = Leaf(torch.tensor([[1, -1, 1]], dtype=torch.int8), bits=torch.tensor([1]))
GOLDEN = {  # hash, then body length, sections, checksum
    "nothing": (Parcel({}, {}), "7d1fc208fafa1450", "01 00 53351a79"),
    "dense": (
        Parcel({"w": Leaf(torch.tensor([[1.0, -2.0]]))}, {"n": torch.tensor([20.0])}),
        "a14b9f91bce3aac4",
        "0e 08 0000803f 000000c0 04 0000a041 68ec8c4d",
    ),
    "half": (
        Parcel({"w": Leaf(torch.tensor([1.0], dtype=torch.bfloat16))}, {"l": torch.tensor([[1.0, 0.5]])}),
        "69e99308f11a234c",
        "0c 02 803f 08 0000803f 0000003f 8f17f3c0",
    ),
    "codes": (Parcel({"w": CODES}, {}), "2eea33f1ec4e727d", "0b 09 00 0203 03 0000803f 38 00 e6582438"),
    "signs": (Parcel({"w": SIGNS}, {}), "9854423648934ab7", "04 02 01 05 00 2c99b5f2"),
    "rice": (Parcel({"w": RICE}, {}), "ca5b77006d6d114e", "08 06 03 08 01 8f 02 01 00 30330720"),
    "filters": (Parcel({"w": FILTERS}, {}), "185ab17359fb5214", "0e 0c 0201 0201 0100000000000000 00 1f47e217"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_format_does_not_drift(name: str) -> None:
    parcel, layout, rest = GOLDEN[name]
    golden = bytes.fromhex("53504152 01" + layout + rest)
    assert to_bytes(parcel, 0).hex() == golden.hex()
    assert to_bytes(from_bytes(golden, schema_of(parcel)), 0) == golden


@pytest.mark.parametrize(
    ("bits", "golden"),
    [
        (at(0), "00"),
        (at(3, 0, 1, 2), "00"),
        (at(3), "01"),
        (at(10, 0, 9), "020102"),
        (at(1000, 3, 500), "030702033811"),
        (at(100, *range(20)), "030014ffff0f"),
        (at(70_000, 69_999), "0310016f1102"),
    ],
)
def test_index_codes(bits: np.ndarray, golden: str) -> None:
    data = b"".join(index.encode_index(bits))
    assert data.hex() == golden
    assert index.index_bytes(torch.from_numpy(bits), torch.tensor([len(bits)])).size.tolist() == [len(data) - 1]
    reader = Reader(memoryview(data))
    assert (index.decode_index(reader, len(bits)) == bits).all()
    assert not reader.left


@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.03, 0.3, 0.39, 0.45])
def test_long_indices_cross_blocks(density: float) -> None:
    bits = np.random.default_rng(0).random(5 * index.BLOCK + 77) < density
    data = b"".join(index.encode_index(bits))
    assert (index.decode_index(Reader(memoryview(data)), len(bits)) == bits).all()
    assert index.index_bytes(torch.from_numpy(bits), torch.tensor([len(bits)])).size.tolist() == [len(data) - 1]


def test_rice_comes_close_to_the_entropy() -> None:
    bits = np.random.default_rng(0).random(1_000_000) < 0.01
    assert len(b"".join(index.encode_index(bits))) * 8 < 0.0825 * len(bits)  # the entropy is 0.0808 bits a position


@pytest.mark.parametrize("width", range(1, 9))
def test_packed_codes_of_every_width(width: int) -> None:
    codes = np.random.default_rng(width).integers(0, 1 << width, 2 * index.BLOCK + 5).astype(np.uint8)
    raw = index.pack(codes, width)
    assert len(raw) == index.packed_size(len(codes), width)
    assert (index.unpack(raw, width, len(codes)) == codes).all()
    assert (index.unpack_some(raw, width, 13, 30) == codes[13:43]).all()


def test_what_the_bytes_are_spent_on() -> None:
    parcel = Parcel({"w": CODES}, {"n": torch.ones(1)})
    parts = {name: int(x) for name, x in parcel_sizes(parcel).items()}
    assert parts == {"value": 1, "index": 1, "scale": 4, "header": 23, "notes": 4}
    assert int(nbytes(parcel)) == 33


def test_masks_of_several_grains_are_counted_among_what_is_left() -> None:
    filters, one = torch.tensor([[[True], [False], [True]]]), torch.tensor([[[True]], [[False]]])
    full = torch.tensor([[[True, False], [False, False], [True, True]]])
    for keep in ((filters, full & filters), (one, full & one), (filters, filters), (full,)):
        value = torch.ones(2, 3, 2)
        for mask in keep:
            value = value * mask
        parcel = Parcel({"w": Leaf(value, None, tuple(mask.expand(2, -1, -1) for mask in keep))}, {})
        assert nbytes(parcel).tolist() == [len(to_bytes(parcel, k)) for k in range(2)]


@pytest.mark.parametrize("tight", [False, True])
def test_no_clients_take_no_bytes(tight: bool) -> None:
    keep = torch.zeros(0, 9, 9, dtype=torch.bool)
    parcel = Parcel({"w": Leaf(torch.zeros(0, 9, 9, dtype=torch.int8), keep=(keep,), bits=8, tight=tight)}, {})
    assert {name: (x.shape, x.dtype) for name, x in parcel_sizes(parcel).items()} == dict.fromkeys(
        ("value", "index", "scale", "header", "notes"), ((0,), torch.int64)
    )
    assert nbytes(parcel).tolist() == []


@pytest.mark.parametrize("masked", [False, True])
def test_a_told_scope_of_everything(masked: bool) -> None:
    """The sender may say None; the reader has a mask all the same, so neither end has a whole matrix."""
    value = torch.zeros(1, 60, 80, dtype=torch.int8)
    value[:, ::9, ::7] = 3
    leaf = Leaf(value, keep=(value != 0,) if masked else (), bits=8, told=True, tight=True)
    parcel = Parcel({"w": leaf}, {})
    got = from_bytes(to_bytes(parcel, 0), schema_of(parcel)).leaves["w"]
    assert got.value.equal(value)
    assert got.scope is not None
    assert got.scope.all()


def test_masks_outside_what_is_alive_are_left_out() -> None:
    scope, wide = bools("110000000000"), bools("101111111111")
    value = torch.ones(1, 12)
    parcel = Parcel({"w": Leaf(value, scope, (wide,))}, {})
    got = from_bytes(to_bytes(parcel, 0), schema_of(parcel)).leaves["w"]
    assert got.keep[0].equal(scope & wide)
    assert got.value.equal((scope & wide).float())


def test_the_hash_covers_the_layout_and_not_the_masks() -> None:
    base = Schema({"w": Spec((4,))}, {"n": 1}, "round 1")
    assert fingerprint(base) == fingerprint(base._replace(leaves={"w": Spec((4,), scope=bools("1000"))}))
    others = [
        base._replace(about="round 2"),
        base._replace(notes={"n": 2}),
        *(
            base._replace(leaves=leaves)
            for leaves in (
                {"v": Spec((4,))},
                {"w": Spec((2, 2))},
                {"w": Spec((4,), torch.float16)},
                {"w": Spec((4,), told=True)},
                {"w": Spec((4,), grains=((4,),))},
                {"w": Spec((4,), scales=1)},
            )
        ),
    ]
    assert len({fingerprint(s) for s in [base, *others]}) == 9


# -------------------------------------------------------------------------------------------------------- refusals

ONE = Schema({"w": Spec((2,))}, {"n": 1}, "round 3")
GOOD = sealed(ONE, bytes(8), bytes(4))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "truncated: 0 bytes"),
        (GOOD[:17], "truncated: 17 bytes, no parcel has less than 18; send it again"),
        (GOOD[:-1], "truncated: 14 bytes of body promised, 13 came"),
        (GOOD + b"\0", "1 bytes behind the parcel; pass exactly one parcel"),
        (b"PK\3\4" + GOOD[4:], "not a parcel: it begins with 504b0304, not 53504152"),
        (GOOD[:4] + b"\2" + GOOD[5:], "wire version 2, this side reads 1 and 3; install the same sparing"),
        (GOOD[:-9] + b"\1" + GOOD[-8:], "damaged on the way; send it again"),
        (GOOD[:5] + b"\0" + GOOD[6:], "damaged on the way"),
        (resealed(GOOD[:5] + bytes(8) + GOOD[13:]), r"schema hash 0{16}, expected .* \(round 3\); start both from"),
        (resealed(GOOD[:13] + b"\x8e\0" + GOOD[14:]), "body length 14 is written with more bytes than it needs"),
        (GOOD[:13] + b"\xff" * 10 + GOOD[14:], "body length has more than 9 bytes"),
        (sealed(ONE, bytes(8)), r"notes, offset 23: section length needs 1 bytes, 0 are left"),
        (sealed(ONE, bytes(7), bytes(4)), r"leaf 0 \(w\), offset 15: 7 bytes of values, 2 of them need 8"),
        (sealed(ONE, bytes(9), bytes(4)), "9 bytes of values, 2 of them need 8"),
        (sealed(ONE, bytes(8), bytes(3)), "notes, offset 24: note needs 4 bytes, 3 are left"),
        (sealed(ONE, bytes(8), bytes(5)), "notes, offset 28: 1 bytes too many"),
        (sealed(ONE, bytes(8), bytes(4), b""), "header, offset 28: 1 bytes too many"),
        (resealed(GOOD[:14] + b"\x7f" + GOOD[15:]), "section needs 127 bytes, 13 are left"),
    ],
)
def test_what_is_not_a_parcel(data: bytes, sentence: str) -> None:
    from_bytes(GOOD, ONE)
    with pytest.raises(WireError, match=sentence):
        from_bytes(data, ONE)


@pytest.mark.parametrize(
    ("spec", "section", "sentence"),
    [
        (Spec((3,), torch.bool), "000201", "a bool of 2, must be 0 or 1"),
        (Spec((3,), torch.int8), "00", "codes of 0 bits, must be 1 to 8"),
        (Spec((3,), torch.int8), "0900000000", "codes of 9 bits"),
        (Spec((3,), torch.int8), "0180", "padding after codes is 0x10, must be zero"),
        (Spec((3,), torch.int8, scales=1), "010000", "scale needs 4 bytes, 2 are left"),
        (Spec((3,), torch.uint8, told=True), "04", "index code 4, known are 0 to 3"),
        (Spec((0,), torch.uint8, told=True), "01", "an empty universe is written as 'all'"),
        (Spec((9,), torch.uint8, told=True), "0255", "bitmap needs 2 bytes, 1 are left"),
        (Spec((9,), torch.uint8, told=True), "025502", "padding after bitmap is 0x1"),
        (Spec((9,), torch.uint8, told=True), "020000", "a bitmap where index code 1 is shorter"),
        (Spec((9,), torch.uint8, told=True), "02ff01", "a bitmap where index code 0 is shorter"),
        (Spec((100,), torch.uint8, told=True), "02" + "ffff0f" + "00" * 10, "a bitmap where index code 3 is shorter"),
        (Spec((100,), torch.uint8, told=True), "030000", "Rice count 0 of 100 positions"),
        (Spec((100,), torch.uint8, told=True), "030064", "Rice count 100 of 100 positions"),
        (Spec((100,), torch.uint8, told=True), "030081" + "00", "Rice count 1 is written with more bytes"),
        (Spec((100,), torch.uint8, told=True), "03ff01", "1 gaps with 255 low bits is no shorter than a bitmap"),
        (Spec((100,), torch.uint8, told=True), "030740", "64 gaps with 7 low bits is no shorter than a bitmap"),
        (Spec((100,), torch.uint8, told=True), "030501", "Rice low bits needs 1 bytes, 0 are left"),
        (Spec((100,), torch.uint8, told=True), "030501e100", "padding after Rice low bits is 0x7"),
        (Spec((100,), torch.uint8, told=True), "0305010100", "the unary part ends after 0 of 1 gaps"),
        (Spec((100,), torch.uint8, told=True), "0305010110", "a gap leads beyond the 100 positions"),
        (Spec((100,), torch.uint8, told=True), "0305010808", "position 104 of 100"),
        (Spec((100,), torch.uint8, told=True), "0305010805", "padding after the unary part must be zero"),
        (Spec((100,), torch.uint8, told=True), "0305010801" + "07", "Rice parameter 5, must be 3"),
        (Spec((50,), torch.uint8, told=True), "03000101" + "00" * 9, "9 bytes of values, 1 of them need 1"),
        (Spec((50,), torch.uint8, told=True), "030014" + "ffff0700000001", "Rice index of 9 bytes, a bitmap has 7"),
    ],
)
def test_sections_that_nobody_wrote(spec: Spec, section: str, sentence: str) -> None:
    schema = Schema({"w": spec}, {})
    with pytest.raises(WireError, match=r"leaf 0 \(w\), offset \d+: .*" + sentence):
        from_bytes(sealed(schema, bytes.fromhex(section), b""), schema)


def test_every_truncation_and_every_flip_is_refused() -> None:
    parcel = Parcel({"w": CODES, "r": RICE, "f": FILTERS}, {"n": torch.ones(1)})
    data, schema = to_bytes(parcel, 0), schema_of(parcel)
    for n in range(len(data)):
        with pytest.raises(WireError):
            from_bytes(data[:n], schema)
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            from_bytes(bad, schema)


@pytest.mark.parametrize(
    ("leaf", "sentence"),
    [
        (
            Leaf(torch.zeros(1, 2, dtype=torch.complex64)),
            "leaf 'w' is torch.complex64; convert it, the wire knows bfloat16",
        ),
        (Leaf(torch.zeros(1, 2), keep=(torch.ones(1, 3) > 0,)), r"mask of shape \(1, 3\) for a value \(1, 2\)"),
        (Leaf(torch.zeros(1, 2), scope=torch.ones(1) > 0), r"mask of shape \(1,\) for a value"),
        (Leaf(torch.zeros(1, 2), keep=(torch.ones(1, 2),)), "a torch.float32 mask"),
        (Leaf(torch.zeros(1, 2), scale=torch.ones(1, 2).double()), "scale is torch.float64"),
        (Leaf(torch.zeros(1, 2, dtype=torch.int8)), "codes of 32 bits; set bits to 1 .. 8"),
        (Leaf(torch.tensor([[4, 0]], dtype=torch.int8), bits=3), "codes from 0 to 4 do not fit 3 bits; clamp"),
        (Leaf(torch.tensor([[1, 0]], dtype=torch.int8), bits=1), "codes from 0 to 1 do not fit 1 bits"),
    ],
)
def test_what_a_sender_may_get_wrong(leaf: Leaf, sentence: str) -> None:
    with pytest.raises(WireError, match=sentence):
        to_bytes(Parcel({"w": leaf}, {}), 0)


def test_notes_and_clients_a_sender_may_get_wrong() -> None:
    with pytest.raises(WireError, match=r"note 'n' is torch.int64: notes travel as float32, call .float\(\)"):
        to_bytes(Parcel({}, {"n": torch.tensor([3])}), 0)
    with pytest.raises(WireError, match="client 2 of a parcel of 2: count from 0"):
        to_bytes(Parcel({}, {"n": torch.ones(2)}), 2)


def test_floats_arrive_with_every_bit() -> None:
    odd = torch.tensor([[0x7FC00001, 0x7F800001, -0x80000000, 0xFF]]).to(torch.int32).view(torch.float32)
    parcel = Parcel({"w": Leaf(odd)}, {})
    got = from_bytes(bytearray(to_bytes(parcel, 0)), schema_of(parcel)).leaves["w"].value
    assert got.view(torch.int32).equal(odd.view(torch.int32))
    got += 1  # it owns its memory


# ---------------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("density", [0.01, 0.39, 0.6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.int8])
def test_decoding_stays_below_twice_the_dense_size(dtype: torch.dtype, density: float) -> None:
    shape = (1500, 2000)
    rng = torch.Generator().manual_seed(0)
    scope = torch.rand(1, *shape, generator=rng) < 0.8
    rows = torch.rand(1, 1500, 1, generator=rng) < 0.9
    keep = (torch.rand(1, *shape, generator=rng) < density) & scope & rows
    parcel = Parcel({"w": Leaf(keep.to(dtype), scope, (rows, keep), bits=8, told=density < 0.5)}, {})
    data, schema = to_bytes(parcel, 0), schema_of(parcel)
    tracemalloc.start()
    try:
        from_bytes(data, schema)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * dense_bytes(schema) + (4 << 20)


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_wire", FUZZER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_wire"] = module  # its dataclasses look it up
    spec.loader.exec_module(module)
    return module


def test_the_fuzzer_knows_every_code(fuzzer: ModuleType) -> None:
    seen: Counter[str] = Counter()
    with fuzzer.counted(seen):
        for sample in fuzzer.samples(seed=1):
            from_bytes(sample.data, sample.schema)
    known = {"index": 4, "tight_index": 6, "tight_values": 6, "frequencies": 4}
    codes = {f"{name} {i}" for name, n in known.items() for i in range(n)}
    assert set(seen) == codes | {"read_one_state", "read_lanes"}


def test_the_fuzzer_finds_nothing(fuzzer: ModuleType) -> None:
    report = fuzzer.fuzz(count=300, seed=1)
    assert report.crashes == 0
    assert report.reached > 0.3 * report.count
    assert report.valid + report.refused == report.count
    assert report.measured == report.count // fuzzer.OFTEN


def test_the_fuzzer_notices(fuzzer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """A decoder that crashes, one that takes memory, one that never ends."""
    real, pool = fuzzer.from_bytes, fuzzer.samples(seed=1, each=1)

    def greedy(data: bytes, schema: Schema) -> Parcel:
        bytearray(2 * dense_bytes(schema) + (5 << 20))
        return real(data, schema)

    def endless(data: bytes, schema: Schema) -> Parcel:
        while True:
            pass

    monkeypatch.setattr(fuzzer, "LONGEST", 0.01)
    monkeypatch.setattr(fuzzer, "samples", lambda seed: pool)
    for broken, least in ((lambda data, schema: 1 / 0, 20), (greedy, 1), (endless, 20)):
        monkeypatch.setattr(fuzzer, "from_bytes", broken)
        assert fuzzer.fuzz(count=20, seed=1, show=1).crashes >= least
    assert "ZeroDivisionError" in (said := capsys.readouterr().err)
    assert "bytes taken" in said
    assert "takes more than" in said
