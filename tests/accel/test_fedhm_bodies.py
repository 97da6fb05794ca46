"""Decompositions that nobody waits for are those that somebody does."""

import pytest
import torch

from sparing.accel.fedhm_bodies import _exact_soon
from sparing.parts.size.fedhm.svd import exact_svds, matrix_energy


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_not_waited_for_is_the_same(device):
    matrices, ranks = [gaussian(2, 40, 30).to(device), gaussian(1, 20, 50).to(device)], [10, 20]
    found, threads = _exact_soon(matrices, ranks), torch.get_num_threads()
    want = exact_svds(matrices, ranks)
    strengths = [(matrix_energy(m).cpu(), svd.s.double().cpu()) for m, svd in zip(matrices, want, strict=True)]
    for one, other in ((found.svds(), want), (found.strengths(), strengths)):
        for mine, yours in zip(one, other, strict=True):
            assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(mine, yours, strict=True))
            assert all(a.dtype == b.dtype and a.device == b.device for a, b in zip(mine, yours, strict=True))
    assert torch.get_num_threads() == threads


def test_nor_are_there_nans_where_there_is_nothing():
    low, none = gaussian(1, 12, 3) @ gaussian(1, 3, 9, seed=1), torch.zeros(1, 9, 12)
    for m, found in zip((low, none), _exact_soon([low, none], [6, 6]).svds(), strict=True):
        assert all(bool(x.isfinite().all()) for x in found)
        assert torch.allclose(found.u * found.s[:, None] @ found.v.mT, m, atol=1e-5)
