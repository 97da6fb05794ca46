"""Damage valid parcels in every way we can think of and watch what `from_bytes` does.

    python benchmarks/fuzz_wire.py --count 1000000 [--jobs 2] [--seed 0]

Every outcome must be a WireError or a valid parcel: right shapes, zeros where nothing was sent, codes in range, and
encoding to the very bytes it came from; in version 3, where the sender may choose, to bytes that mean the same (one in
20 is tried). Most cases get a fresh checksum and body length, so that the damage reaches the section decoders. A case
may take 2 s of processor time. Memory is what tracemalloc sees between entry and exit of one case in 20; NumPy reports
every array to it, and the decoder takes all memory that depends on sizes from NumPy (torch only wraps it), so nothing
large is missed. No case may take the process 256 MiB beyond what it had.
"""

import argparse
import contextlib
import functools
import multiprocessing
import random
import signal
import time
import traceback
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sparing.core.errors import WireError
from sparing.core.parcel import Leaf, Parcel, Schema, sent_mask
from sparing.core.tree import cleared
from sparing.wire import (
    dense_bytes,
    frequencies,
    from_bytes,
    index,
    rans,
    schema_of,
    tight_index,
    tight_values,
    to_bytes,
    version_of,
)
from sparing.wire.frame import CRC, HASH, MAGIC, read_header
from sparing.wire.index import Reader, varint

HEAD = len(MAGIC) + 1 + HASH
CONSTANT = 4 << 20
"""Bytes the decoder may hold beside twice the dense size: its blocks."""
ROOM = 256 << 20
"""Bytes that no case may take, measured or not."""
LONGEST = 2.0
"""Seconds of processor time."""
BIG = 1 << 20
OFTEN = 20
CHUNK = 10_000
"""Cases of one pool of samples."""


def mask(rng: torch.Generator, density: float, *shape: int) -> Tensor:
    return torch.rand(1, *shape, generator=rng) < density


def kept(value: Tensor, *keep: Tensor, scope: Tensor | None = None, **rest: object) -> Leaf:
    leaf = Leaf(value, scope, keep, **rest)  # pyright: ignore[reportArgumentType]
    return leaf._replace(value=cleared(value, sent_mask(leaf)))


def some_codes(rng: torch.Generator, bits: int, *shape: int) -> Tensor:
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
    keep = (mask(rng, 0.3, 12, 1, 1, 1), mask(rng, 0.6, 1, 8, 1, 1))
    scale = torch.rand(1, 2, generator=rng)
    leaves = {f"c{b}": kept(some_codes(rng, b, 12, 8, 3, 3), *keep, scale=scale, bits=b) for b in (1, 3, 8)}
    return Parcel(leaves, {})


def told(rng: torch.Generator) -> Parcel:
    scope = mask(rng, 0.2, 500)
    first = mask(rng, 0.4, 500) & scope
    free = mask(rng, 0.7, 300)
    return Parcel(
        {
            "a": kept(torch.randn(1, 500, generator=rng), first, mask(rng, 0.1, 500) & first, scope=scope, told=True),
            "b": kept(some_codes(rng, 5, 300), mask(rng, 0.05, 300) & free, scope=free, bits=5),
        },
        {"n": torch.rand(1, generator=rng)},
    )


def large(rng: torch.Generator) -> Parcel:
    thin, thick = mask(rng, 0.01, 400, 500), mask(rng, 0.39, 100_000)
    return Parcel(
        {
            "thin": kept(torch.randn(1, 400, 500, generator=rng), thin),
            "thick": kept(torch.randn(1, 100_000, generator=rng), thick),
            "codes": kept(some_codes(rng, 4, 100_000), mask(rng, 0.3, 100_000), bits=4),
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
    shape = ((8, 8), (12, 40), (20, 30), (4, 130), (60, 80))[int(torch.randint(5, (), generator=rng))]
    return some(rng, clusters(rng, *shape))


def long(rng: torch.Generator) -> Parcel:
    """More symbols than need no lanes: one state, or with `many_lanes` in few steps."""
    value = (10 * torch.randn(1, 95, 95, generator=rng)).clamp(-128, 127).to(torch.int8)
    return tightened(Parcel({"long": Leaf(value, bits=8)}, {}))


def many_lanes(parcel: Parcel) -> bytes:
    with mock.patch.object(rans, "lanes_for", lambda price, n: 128 if n > rans.FEW else 0):
        return to_bytes(parcel, 0, "fuzz")


def tall(rng: torch.Generator) -> Parcel:
    """More rows than columns."""
    keep = rough(rng, 1.0, 600, 17).abs() > 0.1
    return tightened(Parcel({"tall": kept(torch.ones(1, 600, 17, dtype=torch.int8), keep, bits=8)}, {}))


def tightened(parcel: Parcel) -> Parcel:
    """The same in version 3."""
    leaves = {
        name: leaf._replace(tight=True, bits=8 if leaf.value.dtype == torch.int8 else leaf.bits)
        for name, leaf in parcel.leaves.items()
    }
    return Parcel(leaves, parcel.notes)


@dataclass
class Sample:
    data: bytes
    schema: Schema
    weight: int = 1  # how often it is damaged
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


WEIGHTS = ((mixed, 40), (convolution, 40), (told, 40), (small, 80), (large, 8), (long, 8), (tall, 8))


def samples(seed: int, each: int = 16) -> list[Sample]:
    rng = torch.Generator().manual_seed(seed)
    out = []
    for build, weight in WEIGHTS:
        for number in range(2 if build is large else each):
            parcel = build(rng) if number % 2 else tightened(build(rng))
            data = many_lanes(parcel) if build is long and number % 4 else to_bytes(parcel, 0, "fuzz")
            out.append(Sample(data, schema_of(parcel, "fuzz"), weight))
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
    at, n = spot(rng, sample, len(body)), rng.choice((1 << 10,) * 40 + (1 << 16,) * 8 + (6 << 20,))
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


def assert_valid(parcel: Parcel, data: bytes, schema: Schema, again: bool) -> None:
    for name, spec in schema.leaves.items():
        leaf = parcel.leaves[name]
        assert (leaf.value.shape, leaf.value.dtype) == ((1, *spec.shape), spec.dtype)
        assert [m.shape for m in leaf.keep] == [(1, *grain) for grain in spec.grains]
        empty = sent_mask(leaf)
        if empty is not None:
            rest = leaf.value.masked_fill(empty.expand_as(leaf.value), 0)
            assert not rest.view(torch.uint8).any()
    assert {name: x.numel() for name, x in parcel.notes.items()} == schema.notes
    if version_of(schema) == 1:
        assert to_bytes(parcel, 0, schema.about) == data, "accepted bytes must encode to themselves"
    elif again:  # the sender may have chosen otherwise
        ours = to_bytes(parcel, 0, schema.about)
        assert to_bytes(from_bytes(ours, schema), 0, schema.about) == ours


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
    measured: int = 0  # cases whose memory was traced
    sentences: set[str] = field(default_factory=set)
    codes: Counter[str] = field(default_factory=Counter)  # how often a decoder began one

    def __str__(self) -> str:
        share = self.reached / max(self.count, 1)
        return (
            f"cases                        {self.count}\n"
            f"reach the section decoders   {self.reached} ({share:.1%})\n"
            f"valid                        {self.valid}\n"
            f"refused                      {self.refused} ({len(self.sentences)} kinds of sentence)\n"
            f"crashes                      {self.crashes}\n"
            f"memory traced                {self.measured}\n"
            f"peak allocation / dense size {self.ratio:.3f} (schemas of 1 MiB and more)\n"
            f"peak beyond twice dense size {self.excess} bytes (allowed: {CONSTANT})\n"
            f"slowest case                 {self.slowest * 1000:.1f} ms of processor time\n"
            f"codes                        {', '.join(f'{k}: {n}' for k, n in sorted(self.codes.items()))}"
        )

    def add(self, other: "Report") -> None:
        for name in ("count", "reached", "valid", "refused", "crashes", "measured"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("ratio", "excess", "slowest"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.sentences |= other.sentences
        self.codes += other.codes


def attempt(data: bytes, schema: Schema, report: Report) -> None:
    report.count += 1
    report.reached += reaches(data, schema)
    rare = report.count % OFTEN == 0
    room = dense_bytes(schema)
    parcel, start = None, time.process_time()
    if rare:
        tracemalloc.start()
    try:
        with limited():
            parcel = from_bytes(data, schema)
    except WireError as error:
        report.refused += 1
        report.sentences.add("".join(c for c in str(error).partition(": ")[2] if not c.isdigit())[:40])
    finally:
        peak = tracemalloc.get_traced_memory()[1] if rare else 0
        tracemalloc.stop()
    report.slowest = max(report.slowest, time.process_time() - start)
    if rare:
        report.measured += 1
        report.excess = max(report.excess, peak - 2 * room)
        report.ratio = max(report.ratio, peak / room) if room >= BIG else report.ratio
    if parcel is not None:
        assert_valid(parcel, data, schema, again=report.valid % OFTEN == 0)
        report.valid += 1
    assert peak <= 2 * room + CONSTANT, f"{peak} bytes taken, dense size {room}"


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """A case that takes too long is interrupted, where the system can do that."""
    if not hasattr(signal, "SIGVTALRM"):
        yield
        return
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def too_long(*_: Any) -> None:
    raise TimeoutError(f"a case takes more than {LONGEST} s of processor time")


DECODERS = (  # and how many codes they know
    (index, "decode_index", 4),
    (tight_index, "decode_tight_index", 6),
    (tight_values, "decode_tight_values", 6),
    (frequencies, "read_frequencies", 4),
    (rans, "read_one_state", 0),
    (rans, "read_lanes", 0),
)


@contextlib.contextmanager
def counted(found: Counter[str]) -> Iterator[None]:
    """Count which codes the decoders meet."""
    with contextlib.ExitStack() as stack:
        for where, name, known in DECODERS:
            stack.enter_context(mock.patch.object(where, name, spy(found, where, getattr(where, name), known)))
        yield


def spy(found: Counter[str], where: ModuleType, real: Callable, known: int) -> Callable:
    def read(reader: Reader, *rest: Any) -> Any:
        code = reader.data[reader.at] if reader.left and known else known
        name = where.__name__.rpartition(".")[2] if known else real.__name__
        found[f"{name} {code if code < known else 'unknown'}" if known else name] += 1
        return real(reader, *rest)

    return read


def fuzz(count: int, seed: int, show: int = 3) -> Report:
    pool, rng, report = samples(seed), random.Random(seed), Report()
    if hasattr(signal, "SIGVTALRM"):
        signal.signal(signal.SIGVTALRM, too_long)
    weights = [sample.weight for sample in pool]
    with counted(report.codes):
        for sample in rng.choices(pool, weights, k=count):
            data = damaged(rng, sample, pool)
            try:
                attempt(data, sample.schema, report)
            except Exception:
                report.crashes += 1
                if report.crashes <= show:
                    traceback.print_exc()
                    print(data[:2000].hex())
    return report


def confined() -> None:
    """No more memory than now and ROOM, where the system can refuse it."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (ImportError, OSError):
        return
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def begin() -> None:
    torch.set_num_threads(1)
    fuzz(200, 0)  # so that everything is loaded
    confined()


def chunk(seed: int, number: int) -> Report:
    return fuzz(CHUNK, seed * 1_000_003 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage parcels and watch the decoder.")
    parser.add_argument("--count", type=int, default=100_000, help=f"rounded up to {CHUNK:,}s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    report, began = Report(), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.jobs, begin) as pool:
        for one in pool.imap_unordered(functools.partial(chunk, args.seed), range(-(-args.count // CHUNK))):
            report.add(one)
            if report.count % (10 * CHUNK) == 0:
                took = time.monotonic() - began
                print(f"{report.count:,} cases, {report.crashes} crashes, {took:,.0f} s", flush=True)
    print(report)
    return 1 if report.crashes else 0


if __name__ == "__main__":
    raise SystemExit(main())
