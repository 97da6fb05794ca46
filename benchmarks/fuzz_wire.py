"""Damage valid parcels in every way we can think of and watch what `from_bytes` does.

    python benchmarks/fuzz_wire.py --count 100000 --seed 0

Every outcome must be a WireError or a valid parcel: right shapes, zeros where nothing was sent, codes in range, and
encoding to the very bytes it came from; in version 2 to bytes that mean the same. Most cases get a fresh checksum and
body length, so that the damage reaches the section decoders. Memory is what tracemalloc sees between entry and exit;
NumPy reports every array to it, and the decoder takes all memory that depends on sizes from NumPy (torch only wraps
it), so nothing large is missed.
"""

import argparse
import random
import time
import traceback
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparing.core.errors import WireError
from sparing.core.parcel import Leaf, Parcel, Schema, cleared, sent
from sparing.core.wire import dense, from_bytes, schema_of, to_bytes, version_of
from sparing.core.wire.frame import CRC, HASH, MAGIC, read_header
from sparing.core.wire.index import Reader, varint

HEAD = len(MAGIC) + 1 + HASH
CONSTANT = 4 << 20
"""Bytes the decoder may hold beside twice the dense size: its blocks."""
BIG = 1 << 20


def mask(rng: torch.Generator, density: float, *shape: int) -> Tensor:
    return torch.rand(1, *shape, generator=rng) < density


def kept(value: Tensor, *keep: Tensor, scope: Tensor | None = None, **rest: object) -> Leaf:
    leaf = Leaf(value, scope, keep, **rest)  # pyright: ignore[reportArgumentType]
    return leaf._replace(value=cleared(value, sent(leaf)))


def codes(rng: torch.Generator, bits: int, *shape: int) -> Tensor:
    half = 1 << bits - 1
    drawn = torch.randint(-half, half, (1, *shape), generator=rng)
    return (2 * drawn + 1 if bits == 1 else drawn).to(torch.int8)


def mixed(rng: torch.Generator) -> Parcel:
    noise = torch.randn(1, 12, generator=rng)
    return Parcel(
        {
            "weight": kept(torch.randn(1, 40, 10, generator=rng), mask(rng, 0.02, 40, 10)),
            "half": Leaf(noise.half()),
            "brain": kept(noise.bfloat16(), mask(rng, 0.5, 12)),
            "double": Leaf(noise.double()),
            "steps": Leaf(torch.tensor([7])),
            "flags": Leaf(mask(rng, 0.5, 9)),
            "none": kept(noise, mask(rng, 0.0, 12)),
            "empty": kept(torch.zeros(1, 0), mask(rng, 0.5, 0)),
        },
        {"n": torch.rand(1, generator=rng), "loss": torch.rand(1, 3, generator=rng)},
    )


def convolution(rng: torch.Generator) -> Parcel:
    keep = (mask(rng, 0.3, 60, 1, 1, 1), mask(rng, 0.6, 1, 20, 1, 1))
    scale = torch.rand(1, 2, generator=rng)
    leaves = {f"c{b}": kept(codes(rng, b, 60, 20, 3, 3), *keep, scale=scale, bits=b) for b in (1, 3, 8)}
    return Parcel(leaves, {})


def told(rng: torch.Generator) -> Parcel:
    scope = mask(rng, 0.2, 500)
    first = mask(rng, 0.4, 500) & scope
    free = mask(rng, 0.7, 300)
    return Parcel(
        {
            "a": kept(torch.randn(1, 500, generator=rng), first, mask(rng, 0.1, 500) & first, scope=scope, told=True),
            "b": kept(codes(rng, 5, 300), mask(rng, 0.05, 300) & free, scope=free, bits=5),
        },
        {"n": torch.rand(1, generator=rng)},
    )


def large(rng: torch.Generator) -> Parcel:
    thin, thick = mask(rng, 0.01, 400, 500), mask(rng, 0.39, 100_000)
    return Parcel(
        {
            "thin": kept(torch.randn(1, 400, 500, generator=rng), thin),
            "thick": kept(torch.randn(1, 100_000, generator=rng), thick),
            "codes": kept(codes(rng, 4, 100_000), mask(rng, 0.3, 100_000), bits=4),
        },
        {},
    )


def rough(rng: torch.Generator, scale: float, rows: int, columns: int) -> Tensor:
    """Noise whose size differs much from row to row and from column to column."""
    sides = torch.rand(1, rows, 1, generator=rng) ** 3 * torch.rand(1, 1, columns, generator=rng) ** 3
    return scale * sides * torch.randn(1, rows, columns, generator=rng)


def clusters(rng: torch.Generator, rows: int, columns: int) -> dict[str, Leaf]:
    """Rows and columns of very different weight: what the codes with classes are for."""
    scale = (2.0, 20.0, 300.0)[int(torch.randint(3, (), generator=rng))]
    drawn = rough(rng, scale, rows, columns).round().clamp(-128, 127).to(torch.int8)
    even = (scale / 10 * torch.randn(1, rows, columns, generator=rng)).clamp(-128, 127).to(torch.int8)
    keep = rough(rng, 1.0, rows, columns).abs() > 0.03
    return {
        "whole": Leaf(drawn, bits=8, scale=torch.rand(1, 1, generator=rng)),
        "known": kept(drawn, drawn != 0, bits=8),
        "places": kept(torch.randn(1, rows, columns, generator=rng), keep),
        "told": kept(even, keep & (even > 0), scope=keep, told=True, bits=8),
        "even": Leaf(even, bits=8),
    }


def some(rng: torch.Generator, leaves: dict[str, Leaf]) -> Parcel:
    names = list(leaves)
    return tightened(Parcel({names[i]: leaves[names[i]] for i in torch.randperm(5, generator=rng)[:2].tolist()}, {}))


def small(rng: torch.Generator) -> Parcel:
    shape = ((12, 40), (40, 30), (60, 80))[int(torch.randint(3, (), generator=rng))]
    return some(rng, clusters(rng, *shape))


def lanes(rng: torch.Generator) -> Parcel:
    """More symbols than are written as whole numbers."""
    return some(rng, clusters(rng, 200, 300))


def tall(rng: torch.Generator) -> Parcel:
    """So many rows that a decoder must not go through them often."""
    keep = rough(rng, 1.0, 10_000, 17).abs() > 0.1
    return tightened(Parcel({"tall": kept(torch.ones(1, 10_000, 17, dtype=torch.int8), keep, bits=8)}, {}))


def tightened(parcel: Parcel) -> Parcel:
    """The same in version 2."""
    leaves = {
        name: leaf._replace(tight=True, bits=8 if leaf.value.dtype == torch.int8 else leaf.bits)
        for name, leaf in parcel.leaves.items()
    }
    return Parcel(leaves, parcel.notes)


@dataclass
class Sample:
    data: bytes
    schema: Schema
    body: bytes = field(init=False)
    marks: list[int] = field(init=False)  # where sections start

    def __post_init__(self) -> None:
        reader = Reader(memoryview(self.data))
        read_header(reader, self.schema)
        start = reader.at
        self.body = self.data[start:-CRC]
        self.marks = []
        while reader.left:
            self.marks.append(reader.at - start)
            reader.section("")


SHARES = ((mixed, 8), (convolution, 4), (told, 8), (large, 1), (small, 8), (lanes, 1), (tall, 1))


def samples(seed: int, each: int = 4) -> list[Sample]:
    rng = torch.Generator().manual_seed(seed)
    out = []
    for build, share in SHARES:
        for number in range(each * share):
            parcel = build(rng) if number % 2 else tightened(build(rng))
            out.append(Sample(to_bytes(parcel, 0, "fuzz"), schema_of(parcel, "fuzz")))
    return out


def spot(rng: random.Random, sample: Sample, n: int) -> int:
    """A place to damage: half the time near the start of a section, where codes, counts and indices stand."""
    place = rng.choice(sample.marks) + rng.randrange(24) if rng.random() < 0.5 else rng.randrange(max(n, 1))
    return min(place, max(n - 1, 0))


def flip(rng: random.Random, body: bytearray, sample: Sample, _: bytes) -> None:
    for _i in range(rng.choice((1, 1, 1, 2, 8))):
        if body:
            body[spot(rng, sample, len(body))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, body: bytearray, sample: Sample, _: bytes) -> None:
    for _i in range(rng.choice((1, 1, 4))):
        if body:
            body[spot(rng, sample, len(body))] = rng.choice((0, 1, 2, 3, 127, 128, 255, rng.randrange(256)))


def truncate(rng: random.Random, body: bytearray, sample: Sample, _: bytes) -> None:
    at = spot(rng, sample, len(body))
    del body[at : at + rng.choice((1, 1, 2, 8, len(body)))]


def insert(rng: random.Random, body: bytearray, sample: Sample, _: bytes) -> None:
    at = spot(rng, sample, len(body))
    body[at:at] = rng.randbytes(rng.choice((1, 1, 2, 9, 64)))


def swell(rng: random.Random, body: bytearray, sample: Sample, _: bytes) -> None:
    """A length that is true, and very many bytes."""
    at, n = spot(rng, sample, len(body)), rng.choice((1 << 10, 1 << 16, 1 << 20, 6 << 20))
    body[at : at + 1] = varint(n) + bytes([rng.choice((0, 1, 128, 255))]) * n


def splice(rng: random.Random, body: bytearray, sample: Sample, other: bytes) -> None:
    at, start, n = spot(rng, sample, len(body)), rng.randrange(len(other)), rng.choice((1, 4, 16, 256))
    piece = other[start : start + n]
    body[at : at + (len(piece) if rng.random() < 0.7 else rng.randrange(n + 1))] = piece


def relength(rng: random.Random, body: bytearray, sample: Sample, _: bytes) -> None:
    """Another length for one section: a little off, far off, overlong, or huge."""
    at = rng.choice(sample.marks)
    reader = Reader(memoryview(sample.body))
    reader.at = at
    n = reader.varint("length")
    size = reader.at - at
    new = rng.choice((max(0, n - 1), n + 1, rng.randrange(2 * n + 2), 1 << rng.randrange(70)))
    raw = varint(new)
    body[at : at + size] = raw[:-1] + bytes([raw[-1] | 128, 0]) if rng.random() < 0.2 else raw


def resection(rng: random.Random, body: bytearray, sample: Sample, other: bytes) -> None:
    """Damage inside one section, whose length is then made true again."""
    number = rng.randrange(len(sample.marks))
    start = sample.marks[number]
    end = sample.marks[number + 1] if number + 1 < len(sample.marks) else len(body)
    reader = Reader(memoryview(sample.body))
    reader.at = start
    reader.varint("length")
    inner = bytearray(sample.body[reader.at : end])
    here = Sample.__new__(Sample)
    here.body, here.marks = bytes(inner), [0]
    rng.choice((flip, overwrite, truncate, insert, splice, swell))(rng, inner, here, other)
    body[start:end] = varint(len(inner)) + inner


Damage = Callable[[random.Random, bytearray, Sample, bytes], None]
DAMAGES: tuple[Damage, ...] = (flip, overwrite, truncate, insert, splice, swell, relength, resection, resection)


def damaged(rng: random.Random, sample: Sample, others: list[Sample]) -> bytes:
    body = bytearray(sample.body)
    for _ in range(rng.choice((1, 1, 1, 2))):
        other = rng.choice(others).body
        chosen = rng.choice(DAMAGES) if body == sample.body else rng.choice(DAMAGES[:6])
        chosen(rng, body, sample, other)
    if rng.random() < 0.1:  # damage nobody mended
        whole = bytearray(sample.data)
        rng.choice((flip, overwrite, truncate, insert))(rng, whole, sample, b"")
        return bytes(whole)
    return sealed(sample.data[:HEAD] + varint(len(body)) + body)


def sealed(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(CRC, "little")


def reaches(data: bytes, schema: Schema) -> bool:
    try:
        read_header(Reader(memoryview(data)), schema)
    except WireError:
        return False
    return True


def assert_valid(parcel: Parcel, data: bytes, schema: Schema) -> None:
    for name, spec in schema.leaves.items():
        leaf = parcel.leaves[name]
        assert (leaf.value.shape, leaf.value.dtype) == ((1, *spec.shape), spec.dtype)
        assert [m.shape for m in leaf.keep] == [(1, *grain) for grain in spec.grains]
        empty = sent(leaf)
        if empty is not None:
            rest = leaf.value.masked_fill(empty.expand_as(leaf.value), 0)
            assert not rest.view(torch.uint8).any()
    assert {name: x.numel() for name, x in parcel.notes.items()} == schema.notes
    again = to_bytes(parcel, 0, schema.about)
    if version_of(schema) == 1:
        assert again == data, "accepted bytes must encode to themselves"
    else:  # the sender may have chosen another code
        assert to_bytes(from_bytes(again, schema), 0, schema.about) == again


@dataclass
class Report:
    count: int = 0
    reached: int = 0
    valid: int = 0
    refused: int = 0
    crashes: int = 0
    ratio: float = 0.0  # of schemas of a MiB and more
    excess: int = 0  # bytes beyond twice the dense size
    slowest: float = 0.0
    sentences: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        share = self.reached / max(self.count, 1)
        return (
            f"cases                        {self.count}\n"
            f"reach the section decoders   {self.reached} ({share:.1%})\n"
            f"valid                        {self.valid}\n"
            f"refused                      {self.refused} ({len(self.sentences)} kinds of sentence)\n"
            f"crashes                      {self.crashes}\n"
            f"peak allocation / dense size {self.ratio:.3f} (schemas of 1 MiB and more)\n"
            f"peak beyond twice dense size {self.excess} bytes (allowed: {CONSTANT})\n"
            f"slowest case                 {self.slowest * 1000:.1f} ms"
        )


def attempt(data: bytes, schema: Schema, report: Report) -> None:
    report.count += 1
    report.reached += reaches(data, schema)
    room = dense(schema)
    parcel, start = None, time.perf_counter()
    tracemalloc.start()
    try:
        parcel = from_bytes(data, schema)
    except WireError as error:
        report.refused += 1
        report.sentences.add("".join(c for c in str(error).partition(": ")[2] if not c.isdigit())[:40])
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    report.slowest = max(report.slowest, time.perf_counter() - start)
    report.excess = max(report.excess, peak - 2 * room)
    if room >= BIG:
        report.ratio = max(report.ratio, peak / room)
    if parcel is not None:
        assert_valid(parcel, data, schema)
        report.valid += 1
    assert peak <= 2 * room + CONSTANT, f"{peak} bytes taken, dense size {room}"


def fuzz(count: int, seed: int, show: int = 3) -> Report:
    pool, rng, report = samples(seed), random.Random(seed), Report()
    for _ in range(count):
        sample = rng.choice(pool)
        data = damaged(rng, sample, pool)
        try:
            attempt(data, sample.schema, report)
        except Exception:
            report.crashes += 1
            if report.crashes <= show:
                traceback.print_exc()
                print(data[:2000].hex())
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage parcels and watch the decoder.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report = fuzz(args.count, args.seed)
    print(report)
    return 1 if report.crashes else 0


if __name__ == "__main__":
    raise SystemExit(main())
