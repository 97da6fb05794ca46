"""The laws of the wire: sizes are true, what arrives was sent, nothing can be written in two ways."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparing.core.parcel import Leaf, Parcel, Schema, Spec, parcel_row
from sparing.core.tree import cleared
from sparing.wire import from_bytes, nbytes, parcel_sizes, to_bytes

FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
WHOLE = [torch.int64, torch.int32, torch.uint8, torch.bool]
DTYPES = [*FLOATS, *WHOLE, *[torch.int8] * 4]
SHAPES = [(), (0,), (3, 0), (1,), (9,), (300,), (2500,), (8, 5), (4, 3, 2, 2), (6, 1, 3, 3)]


def some_mask(draw: Callable, rng: torch.Generator, rows: int, shape: tuple[int, ...]) -> Tensor:
    density = draw(st.sampled_from([0.0, 0.002, 0.05, 0.2, 0.39, 0.5, 0.9, 1.0]))
    return torch.rand(rows, *shape, generator=rng) < density


def some_value(rng: torch.Generator, rows: int, shape: tuple[int, ...], dtype: torch.dtype, bits: Tensor) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(rows, *shape, generator=rng).to(dtype)
    if dtype != torch.int8:
        top = 2 if dtype == torch.bool else 256
        return torch.randint(0, top, (rows, *shape), generator=rng).to(dtype)
    half = (2 ** (bits - 1)).reshape(-1, *[1] * len(shape))
    codes = torch.randint(0, 256, (rows, *shape), generator=rng) % (2 * half) - half
    return torch.where(half == 1, 2 * codes + 1, codes).to(torch.int8)


@st.composite
def leaves(draw: Callable, k: int, tight: bool) -> Leaf:
    """A leaf in its one form: full masks false outside what is alive, values zero where not sent."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from(DTYPES))
    axis = st.sampled_from([1, k])
    scope, told = None, False
    if draw(st.booleans()):
        scope, told = some_mask(draw, rng, draw(axis), shape), draw(st.booleans())
    alive, keep = scope, []
    for coarse in draw(st.lists(st.booleans(), max_size=3)):
        grain = tuple(s if draw(st.booleans()) else 1 for s in shape) if coarse else shape
        mask = some_mask(draw, rng, draw(axis), grain)
        if grain == shape and alive is not None:
            mask = mask & alive
        alive = mask if alive is None else alive & mask
        keep.append(mask)
    rows = max([draw(axis)] + ([] if alive is None else [len(alive)]))
    bits = torch.tensor([draw(st.integers(1, 8)) for _ in range(rows if draw(st.booleans()) else 1)])
    value = cleared(some_value(rng, rows, shape, dtype, bits), alive).expand(rows, *shape)
    scale = torch.randn(draw(axis), draw(st.integers(1, 4)), generator=rng) if draw(st.booleans()) else None
    width = (int(bits[0]) if len(bits) == 1 and draw(st.booleans()) else bits) if dtype == torch.int8 else 32
    return Leaf(value, scope, tuple(keep), scale, 8 if tight and dtype == torch.int8 else width, told, tight)


@st.composite
def parcels(draw: Callable, versions: tuple[int, ...] = (1, 2)) -> tuple[Parcel, int]:
    k = draw(st.integers(1, 4))
    tight = st.sampled_from([version == 2 for version in versions])
    parts = {f"leaf{i}": draw(leaves(k, draw(tight))) for i in range(draw(st.integers(0, 3)))}
    notes = {"n": torch.rand(k)}
    for name in draw(st.sets(st.sampled_from(["loss", "ack", "a/b"]))):
        notes[name] = torch.rand(k, draw(st.sampled_from([0, 2, 3])))
    return Parcel(parts, notes), k


def expected(parcel: Parcel, about: str) -> Schema:
    """What a receiver would build: shapes and free scopes, no data-dependent mask looked into."""
    specs = {
        name: Spec(
            shape=tuple(leaf.value.shape[1:]),
            dtype=leaf.value.dtype,
            scope=None if leaf.told else leaf.scope,
            told=leaf.told,
            grains=tuple(tuple(m.shape[1:]) for m in leaf.keep),
            scales=0 if leaf.scale is None else leaf.scale.shape[1],
            tight=leaf.tight,
        )
        for name, leaf in parcel.leaves.items()
    }
    return Schema(specs, {name: 1 if x.ndim == 1 else x.shape[1] for name, x in reversed(parcel.notes.items())}, about)


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in dtype, shape and every bit."""
    if a is None or b is None:
        return a is b
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool((a.contiguous().view(torch.uint8) == b.contiguous().view(torch.uint8)).all()) if a.ndim else a.equal(b)


def assert_same(got: Parcel, want: Parcel) -> None:
    assert list(got.leaves) == list(want.leaves)
    assert set(got.notes) == set(want.notes)
    for name, leaf in want.leaves.items():
        other = got.leaves[name]
        assert same(other.value, leaf.value)
        assert same(other.scope, leaf.scope)
        assert len(other.keep) == len(leaf.keep)
        assert all(map(same, other.keep, leaf.keep))
        assert same(other.scale, leaf.scale)
        assert (other.bits, other.told, other.tight) == (int(leaf.bits), leaf.told, leaf.tight)
    for name, note in want.notes.items():
        assert same(got.notes[name], note)


@settings(max_examples=200, deadline=None)
@given(parcels())
def test_the_size_is_true_to_the_byte(drawn: tuple[Parcel, int]) -> None:
    parcel, k = drawn
    total = nbytes(parcel)
    assert total.dtype == torch.int64
    assert total.tolist() == [len(to_bytes(parcel, i)) for i in range(k)]
    parts = parcel_sizes(parcel)
    assert list(parts) == ["value", "index", "scale", "header", "notes"]
    assert all(x.shape == (k,) and bool((x >= 0).all()) for x in parts.values())


@settings(max_examples=200, deadline=None)
@given(parcels(), st.text(max_size=8))
def test_what_arrives_is_what_was_sent(drawn: tuple[Parcel, int], about: str) -> None:
    parcel, k = drawn
    for i in range(k):
        want = parcel_row(parcel, i)
        data = to_bytes(parcel, i, about)
        got = from_bytes(data, expected(want, about))
        assert_same(got, want)
        assert to_bytes(got, 0, about) == data


@settings(max_examples=60, deadline=None)
@given(parcels())
def test_a_row_costs_the_same_alone(drawn: tuple[Parcel, int]) -> None:
    parcel, k = drawn
    for i in range(k):
        alone = parcel_sizes(parcel_row(parcel, i))
        assert {name: int(x[0]) for name, x in alone.items()} == {n: int(x[i]) for n, x in parcel_sizes(parcel).items()}


@settings(max_examples=100, deadline=None)
@given(parcels(versions=(1,)))
def test_a_second_decoder_agrees(drawn: tuple[Parcel, int]) -> None:
    parcel, _ = drawn
    want = parcel_row(parcel, 0)
    got = slow_decode(to_bytes(parcel, 0), expected(want, ""))
    for name, leaf in want.leaves.items():
        assert got[name] == slow_values(leaf)


@pytest.mark.parametrize("rows", [1, 3])
def test_sizes_in_stretches_of_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(0)
    scope = torch.rand(rows, 100, generator=rng) < 0.7
    keep = (torch.rand(3, 100, generator=rng) < 0.1) & scope
    parcel = Parcel({"w": Leaf(torch.zeros(3, 100), scope, (keep,))}, {})
    whole = nbytes(parcel)
    monkeypatch.setattr("sparing.wire.count.POSITIONS", 150)
    assert nbytes(parcel).tolist() == whole.tolist() == [len(to_bytes(parcel, i)) for i in range(3)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sizes_and_bytes_on_the_gpu() -> None:
    keep = torch.rand(3, 5000, generator=torch.Generator().manual_seed(0)) < torch.tensor([[0.01], [0.2], [0.6]])
    filters = torch.tensor([[True, False, True, True, True]]).reshape(1, 5, 1)
    leaf = Leaf(cleared(torch.ones(3, 5, 1000), keep.reshape(3, 5, 1000)), None, (filters, keep.reshape(3, 5, 1000)))
    parcel = Parcel({"w": leaf}, {"n": torch.ones(3)})
    moved = Leaf(leaf.value.cuda(), None, tuple(m.cuda() for m in leaf.keep))
    there = Parcel({"w": moved}, {"n": torch.ones(3).cuda()})
    assert nbytes(there).tolist() == nbytes(parcel).tolist()
    assert [to_bytes(there, i) for i in range(3)] == [to_bytes(parcel, i) for i in range(3)]


# --------------------------------------------------------------- a second decoder, bit by bit, from docs/wire.md alone


class Bits:
    def __init__(self, data: bytes):
        self.bits = [byte >> j & 1 for byte in data for j in range(8)]

    def number(self, width: int) -> int:
        taken, self.bits = self.bits[:width], self.bits[width:]
        return sum(bit << j for j, bit in enumerate(taken))


class Slow:
    def __init__(self, data: bytes):
        self.data = data

    def take(self, n: int) -> bytes:
        taken, self.data = self.data[:n], self.data[n:]
        assert len(taken) == n
        return taken

    def varint(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self.take(1)[0]
            value, shift = value + (byte % 128 << shift), shift + 7
            if byte < 128:
                return value

    def packed(self, n: int, width: int) -> list[int]:
        bits = Bits(self.take(math.ceil(n * width / 8)))
        return [bits.number(width) for _ in range(n)]

    def index(self, u: int) -> list[bool]:
        code = self.take(1)[0]
        if code < 2:
            return [code == 0] * u
        if code == 2:
            return [bool(b) for b in self.packed(u, 1)]
        low, count = self.take(1)[0], self.varint()
        gaps = [0] * count
        for shift in [*range(0, low - low % 8, 8), low - low % 8]:
            width = min(8, low - shift)
            gaps = [g + (x << shift) for g, x in zip(gaps, self.packed(count, width), strict=True)]
        ends, at = [], 0
        while len(ends) < count:
            byte = self.take(1)[0]
            ends += [at + j for j in range(8) if byte >> j & 1]
            at += 8
        out, place, before = [False] * u, -1, -1
        for gap, end in zip(gaps, ends, strict=True):
            place += gap + (end - before - 1 << low) + 1
            before, out[place] = end, True
        return out


def slow_decode(data: bytes, schema: Schema) -> dict[str, list[bytes | int]]:
    """The values sent, per leaf, in order."""
    body = Slow(data[13:-4])
    assert body.varint() == len(body.data)
    return {name: slow_leaf(Slow(body.take(body.varint())), spec) for name, spec in schema.leaves.items()}


def slow_leaf(part: Slow, spec: Spec) -> list[bytes | int]:
    n = math.prod(spec.shape)
    alive = np.ones(spec.shape, bool) if spec.scope is None else spec.scope[0].numpy()
    if spec.told:
        alive = np.array(part.index(n), bool).reshape(spec.shape)
    for grain in spec.grains:
        if grain == spec.shape:
            mask = np.zeros(spec.shape, bool)
            mask[alive] = part.index(int(alive.sum()))
        else:
            mask = np.array(part.index(math.prod(grain)), bool).reshape(grain)
        alive = alive & mask
    width = part.take(1)[0] if spec.dtype == torch.int8 else 0
    part.take(4 * spec.scales)
    count = int(alive.sum())
    if not width:
        values = [part.take(spec.dtype.itemsize) for _ in range(count)]
    else:
        values = [2 * c - 1 if width == 1 else c - 2 ** (width - 1) for c in part.packed(count, width)]
    assert not part.data
    return values


def slow_values(leaf: Leaf) -> list[bytes | int]:
    alive = torch.ones_like(leaf.value, dtype=torch.bool)
    for mask in (*leaf.keep, *([] if leaf.scope is None else [leaf.scope])):
        alive = alive & mask
    kept = leaf.value[alive]
    if leaf.value.dtype == torch.int8:
        return kept.tolist()
    raw = kept.view(torch.uint8).numpy().tobytes()
    size = leaf.value.dtype.itemsize
    return [raw[i : i + size] for i in range(0, len(raw), size)]
