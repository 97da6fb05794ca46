"""Tight leaves written by compiled loops have the plain bytes, and many clients' are measured without writing."""

import numpy as np
import pytest
import torch
from torch import Tensor

from sparing.core.parcel import Leaf
from sparing.wire import count, tight_index, tight_values
from sparing.wire.index import Reader

SHAPES = [(0, 1), (1, 1), (1, 9), (8, 8), (9, 30), (40, 25), (64, 27), (130, 70), (12, 900), (300, 400), (3, 7000)]
SCALES = [0.0, 0.05, 0.3, 1.0, 60.0]


def drawn(shape: tuple[int, int], scale: float, steep: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and positions that are kept, both clustering in rows and columns."""
    rng = np.random.default_rng(int(100 * scale) + shape[1])
    rough = np.exp(steep * (rng.normal(size=(shape[0], 1)) + rng.normal(size=shape[1])))
    codes = np.clip(np.round(scale * rough * rng.normal(size=shape)), -128, 127).astype(np.int8)
    return codes.reshape(-1), (rng.random(shape) < min(0.02 + scale / 2, 1) * rough).reshape(-1)


@pytest.mark.parametrize("steep", [0.0, 1.5])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bytes(shape: tuple[int, int], scale: float, steep: float) -> None:
    codes, bits = drawn(shape, scale, steep)
    for columns in (None, shape[1]):
        for op, given in (
            (tight_index.encode_tight_index, (bits, columns)),
            (tight_values.encode_tight_values, (codes, columns)),
            (tight_values.encode_tight_values, (codes[bits], columns, bits)),
        ):
            assert b"".join(op.body(*given)) == b"".join(op.plain(*given))


def test_every_way_of_writing_is_met() -> None:
    """So that the test above compares all of them."""
    met = [set[int](), set[int]()]
    for shape in SHAPES:
        for scale in SCALES:
            codes, bits = drawn(shape, scale, 1.5)
            for columns in (None, shape[1]):
                met[0].add(tight_index.encode_tight_index(bits, columns)[0][0])
                met[1].add(tight_values.encode_tight_values(codes, columns)[0][0])
                met[1].add(tight_values.encode_tight_values(codes[bits], columns, bits)[0][0])
    assert met == [{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}]


@pytest.mark.parametrize("mostly", [0.001, 0.7])
def test_many_codes(mostly: float) -> None:
    """More than are tried in every way: in lanes, their low bits in several blocks."""
    rng = np.random.default_rng(0)
    codes = ((rng.random(400_000) < mostly) * rng.integers(-9, 10, 400_000)).astype(np.int8)
    apart = np.zeros(40_000_000, bool)
    apart[:: 40_000_000 // 70_000] = True
    for columns in (None, 800):
        data = b"".join(tight_values.encode_tight_values(codes, columns))
        assert data == b"".join(tight_values.encode_tight_values.plain(codes, columns))
        assert (tight_values.decode_tight_values(Reader(memoryview(data)), len(codes), columns) == codes).all()
    assert b"".join(tight_index.encode_tight_index(apart, None)) == b"".join(
        tight_index.encode_tight_index.plain(apart, None)
    )


def leaves(shape: tuple[int, ...], k: int, share: float) -> list[Leaf]:
    g = torch.Generator().manual_seed(k)
    value = (torch.randn(k, *shape, generator=g) * 3 * share).round().clamp(-128, 127).to(torch.int8)
    keep, scope = torch.rand(k, *shape, generator=g) < share, torch.rand(1, *shape, generator=g) < 0.6

    def leaf(mask: Tensor, *masks: object, told: bool = False) -> Leaf:
        scope, *keeps = masks
        return Leaf(torch.where(mask, value, 0), scope, tuple(keeps), bits=8, told=told, tight=True)  # type: ignore[arg-type]

    filters = torch.rand(k, shape[0], *[1] * (len(shape) - 1), generator=g) < 0.5
    return [
        Leaf(value, bits=8, tight=True),
        Leaf(value[:1].expand(3, *shape), keep[:1].expand(3, *shape), bits=8, tight=True),
        Leaf(value[:1], keep=(torch.rand(3, *shape, generator=g) < 1,), bits=8, tight=True),
        Leaf(torch.where(keep, 1.5, 0.0), keep=(keep,), tight=True),
        leaf(keep, None, keep),
        leaf(scope, scope),
        leaf(scope, scope, told=True),
        leaf(scope & keep, scope, keep),
        leaf(scope & keep, scope, scope & keep, told=True),
        leaf(filters.expand(k, *shape), None, filters),
        leaf(scope & filters & keep, scope, filters, keep),
        leaf(filters[:1].expand(k, *shape), filters[:1]),
    ]


@pytest.mark.parametrize("share", [0.02, 1.0])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("shape", [(5,), (20, 30), (8, 3, 3, 3), (64, 800)])
def test_clients_are_measured_as_they_are_written(shape: tuple[int, ...], k: int, share: float) -> None:
    for leaf in leaves(shape, k, share):
        fast, plain = (sizes({"w": leaf})()["w"] for sizes in (count.written_sizes, count.written_sizes.plain))
        assert all(np.array_equal(a, b) for a, b in zip(fast, plain, strict=True))


def test_codes_without_a_place_are_refused() -> None:
    with pytest.raises(AssertionError, match="a code for every kept position"):
        tight_values.encode_tight_values(np.ones(9, np.int8), None, np.ones(8, bool))


def test_a_mask_that_is_the_same_everywhere_may_lie_in_memory_once():
    nowhere, everywhere = (np.broadcast_to(np.array([same]), (40,)) for same in (False, True))
    codes = np.arange(40).astype(np.int8)
    for kept, sent in ((nowhere, codes[:0]), (everywhere, codes)):
        plain = tight_values.encode_tight_values.plain(sent, 4, kept)
        assert b"".join(tight_values.encode_tight_values(sent, 4, kept)) == b"".join(plain)
        assert b"".join(tight_index.encode_tight_index(kept, 4)) == b"".join(
            tight_index.encode_tight_index.plain(kept, 4)
        )
