import pytest
import torch

from sparing.engines.divergence import difference_sums

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("k", [1, 5, 16, 50])
def test_sums_and_squares_are_those_of_the_cpu(k):
    shapes = [(1, 300, 7), (k, 40, 5), (k, 1), (k, 0), (k, 3001)]
    pairs = [(torch.randn(s), torch.randn(1, *s[1:])) for s in shapes]
    there = difference_sums([(x.cuda(), origin.cuda()) for x, origin in pairs], k)
    assert torch.allclose(there.cpu(), difference_sums(pairs, k), rtol=1e-12, atol=1e-12)
