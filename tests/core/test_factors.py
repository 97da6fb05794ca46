"""Factors multiplied out for many clients at once."""

import pytest
import torch

from sparing.accel.fedhm_bodies import LONG
from sparing.parts.factors import factor_product, factor_shapes, gram_of_rows

SHAPES = [((64, 32, 3, 3), 32), ((6, 8, 3, 2), 5), ((5, 3, 1, 4), 1), ((70, 130), 33), ((128, 1000), 64)]


def factors(shape, rank, k):
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(k, *one, generator=g) for one in factor_shapes(shape, rank)]


@pytest.mark.parametrize(("shape", "rank"), SHAPES)
def test_the_product_is_the_sum_over_the_rank(shape, rank):
    a, b = (x.double() for x in factors(shape, rank, 3))
    whole = factor_product(a, b)
    assert whole.shape == (3, *shape)
    want = torch.einsum("kmrh,krnw->kmnhw", a.reshape(3, *a.shape[1:3], -1), b.reshape(3, *b.shape[1:3], -1))
    assert torch.allclose(whole, want.reshape(whole.shape))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "rank"), SHAPES)
def test_gpu_agrees_with_the_cpu_and_rows_are_exact(shape, rank):
    a, b = factors(shape, rank, 7)
    whole = factor_product(a.cuda(), b.cuda())
    assert torch.allclose(whole.cpu(), factor_product(a, b), atol=1e-4)
    for k in (0, 6):
        assert torch.equal(factor_product(a[k : k + 1].cuda(), b[k : k + 1].cuda())[0], whole[k])
    a, b = (4 * a).round(), (4 * b).round()
    assert torch.equal(factor_product(a.cuda(), b.cuda()).cpu(), factor_product(a, b)), (
        "sums of whole numbers are exact"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("n", [100, LONG, LONG + 1, 12544])
def test_squares_of_long_rows_on_a_gpu(n):
    rows = torch.randn(3, 5, n, dtype=torch.float64)
    assert torch.allclose(gram_of_rows(rows.cuda()).cpu(), gram_of_rows(rows))
