import pytest
import torch

from sparing.accel.lazy_product import Product, formed
from sparing.core import reduce
from sparing.core.reduce import Term, _rows_at, dots, total

SHAPES = [(3, 2), (), (5000,), (0,), (70, 300)]


def by_sign(x, minus):
    return (None, -x) if minus else (x, None)


def terms(k=3, masks=None, shared=True, minus=False):
    g = torch.Generator().manual_seed(0)
    rows = 1 if shared else k
    return [
        Term(
            torch.randn(k, *shape, generator=g),
            *by_sign(torch.randn(1, *shape, generator=g), minus),
            torch.randn(rows, *shape, generator=g),
            None if masks is None else torch.rand(masks, *shape, generator=g) < 0.5,
        )
        for shape in SHAPES
    ]


@pytest.mark.parametrize("masks", [None, 1, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_they_are_the_inner_products(masks, shared):
    given = terms(masks=masks, shared=shared)
    aa, ab, bb = dots(given, 3)
    for i, (x, shift, _, other, mask) in enumerate(given):
        inside = torch.ones(()) if mask is None else mask
        a, b = ((y * inside).expand(x.shape).reshape(3, -1) for y in (x.double() + shift.double(), other.double()))
        for got, wanted in ((aa, a * a), (ab, a * b), (bb, b * b)):
            assert torch.allclose(got[:, i], wanted.sum(1), rtol=1e-12)


def test_rows_are_as_alone_and_blocks_change_nothing(monkeypatch):
    given = terms(masks=3, shared=False)
    whole = dots(given, 3)
    monkeypatch.setattr(reduce, "AT_ONCE", 100)
    assert torch.equal(dots(given, 3), whole)
    for k in range(3):
        at = slice(k, k + 1)
        one = [Term(*(None if y is None else _rows_at(y, at) for y in term)) for term in given]
        assert torch.equal(dots(one, 1)[:, 0], whole[:, k])


def test_taking_away_is_adding_with_the_other_sign():
    assert torch.equal(dots(terms(masks=3, minus=True), 3), dots(terms(masks=3), 3))


def test_squares_alone_have_the_same_bits():
    assert torch.equal(dots([term._replace(other=None) for term in terms()], 3)[0], dots(terms(), 3)[0])


@pytest.mark.accel
def test_a_product_of_thin_matrices_is_not_kept():
    x = Product(torch.randn(3, 2, 4), torch.randn(3, 2, 5))
    got = dots([Term(x)], 3)
    assert x.whole is None
    assert torch.equal(got[0, :, 0], total(formed(x).double().square()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("masks", [None, 1, 3])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_gives_the_same_bits(masks, shared, paired, dtype):
    given = [term._replace(x=term.x.to(dtype)) for term in terms(masks=masks, shared=shared)]
    given = given if paired else [term._replace(other=None) for term in given]
    there = [Term(*(None if y is None else y.cuda() for y in term)) for term in given]
    assert torch.equal(dots(there, 3).cpu(), dots(given, 3))
    away = [term._replace(plus=None, minus=-term.plus) for term in there]
    assert torch.equal(dots(away, 3).cpu(), dots(given, 3))
    first = [term._replace(x=term.x[:1]) for term in given]
    assert torch.equal(dots([term._replace(x=term.x[:1]) for term in there], 3).cpu(), dots(first, 3))
