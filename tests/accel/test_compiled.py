"""Compiled loops give the plain bodies' bytes and numbers, and refuse what they refuse."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sparing.core.errors import WireError
from sparing.core.operation import Operation
from sparing.parts.code.budget import rate_distortion
from sparing.parts.code.budget.matrices import strongest_components
from sparing.wire import index, levels, rans, tight_values
from sparing.wire.index import Reader
from sparing.wire.rans import RansPlan
from support import make_ctx

Drawn = tuple[np.ndarray, np.ndarray | None]


def geometric(rng: np.random.Generator, n: int, mean: float) -> np.ndarray:
    return np.minimum(rng.geometric(1 / (1 + mean), n) - 1, 255).astype(np.uint8)


def draws() -> list[Drawn]:
    """Few and many symbols, steep and flat, one alone, all values, in no, few and many contexts."""
    rng, out = np.random.default_rng(0), []
    for n in (1, 2, 63, 64, 300, 5_000, 8_192, 8_193, 30_000, 200_000):
        for symbols in (
            np.full(n, 7, np.uint8),
            geometric(rng, n, 0.01),
            geometric(rng, n, 3.0),
            rng.integers(0, 256, n).astype(np.uint8),
            np.clip(rng.normal(90, 9, n), 0, 255).astype(np.uint8),
        ):
            for contexts in (None, rng.integers(0, 3, n), np.sort(rng.integers(0, 200, n))):
                out.append((symbols, None if contexts is None else contexts.astype(np.uint8)))
    return out


def compared(op: Operation, *args: object) -> Any:
    fast, plain = (body(*args) for body in (op.body, op.plain))
    assert op.body is not op.plain
    for a, b in zip(fast, plain, strict=True):
        assert np.array_equal(a, b)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None)
    return fast


@pytest.mark.parametrize("drawn", draws(), ids=lambda drawn: f"{len(drawn[0])}")
def test_plans_and_bytes_are_the_same(drawn: Drawn) -> None:
    symbols, contexts = drawn
    chosen = compared(rans.plan_rans, symbols, contexts)
    for lanes, write, read in ((0, rans.in_one_state, rans.read_one_state), (33, rans.in_lanes, rans.read_lanes)):
        one = chosen._replace(lanes=lanes)
        data = b"".join(compared(write, one, symbols, contexts))
        for body in (read.body, read.plain):
            reader = Reader(memoryview(data))
            got = body(reader, one, len(symbols), contexts)
            assert (got == symbols).all()
            assert got.dtype == np.uint8
            assert not reader.left


@pytest.mark.parametrize("lanes", [0, 33])
def test_damage_is_refused_in_the_same_words(lanes: int) -> None:
    rng = np.random.default_rng(1)
    symbols, contexts = geometric(rng, 2_000, 4.0), rng.integers(0, 5, 2_000).astype(np.uint8)
    chosen = rans.plan_rans(symbols, contexts)._replace(lanes=lanes)
    write, read = (rans.in_lanes, rans.read_lanes) if lanes else (rans.in_one_state, rans.read_one_state)
    data = b"".join(write(chosen, symbols, contexts))
    for _ in range(200):
        bad, where = bytearray(data), int(rng.integers(len(data)))
        bad[where] ^= 1 << int(rng.integers(8))
        bad = bad[: int(rng.integers(len(data)))] if rng.random() < 0.3 else bad
        assert said(read.body, bad, chosen, contexts) == said(read.plain, bad, chosen, contexts)


def said(body: Callable, data: bytes, chosen: RansPlan, contexts: np.ndarray) -> tuple:
    reader = Reader(memoryview(bytes(data)))
    try:
        return body(reader, chosen, len(contexts), contexts).tobytes(), reader.at
    except WireError as error:
        return str(error), None


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (30, 20), (200, 17), (17, 200)])
@pytest.mark.parametrize("share", [0.002, 0.1, 0.7])
def test_positions_have_the_same_classes_and_quotients(rows: int, columns: int, share: float) -> None:
    rng = np.random.default_rng(2)
    chance = share * np.exp(rng.normal(size=(rows, 1)) + rng.normal(size=columns))
    places = np.flatnonzero(rng.random((rows, columns)) < chance)
    bits = np.zeros(rows * columns, bool)
    bits[places] = True
    compared(levels.class_of_kept, bits, columns)
    compared(tight_values.sums_of, rng.integers(0, 256, rows * columns).astype(np.uint8) * bits, columns)
    for low in (1, 3, 9) if len(places) else ():
        assert index.quotient_sum(places, low) == index.quotient_sum.plain(places, low)


@pytest.mark.parametrize("shape", [(1, 40), (30, 50), (200, 90), (90, 200)])
@pytest.mark.parametrize("spread", [0.0, 1.5])
def test_the_same_is_chosen_for_every_step(shape: tuple[int, int], spread: float) -> None:
    g = torch.Generator().manual_seed(0)
    rows, columns = shape
    rough = (spread * torch.randn(1, rows, 1, generator=g)).exp()
    strong = torch.randn(1, rows, 3, generator=g) @ torch.randn(1, 3, columns, generator=g)
    m = (torch.randn(1, rows, columns, generator=g) * rough + 2 * strong).double()
    parts = strongest_components("w", m, 8, make_ctx([0])) if rows > 1 else None
    one = rate_distortion.piece(m, parts)
    seen = set()
    for step in np.geomspace(1e-3, 100, 60).tolist():
        for rest in (True, False):
            chosen = compared(rate_distortion.judged, one, step, rest)
            compared(rate_distortion.judged, one, step * 0.9, rest, chosen)
            seen.add((chosen.rank > 0, chosen.longer))
    assert len(seen) >= 3
