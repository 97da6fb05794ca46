"""Long rows on a CPU: what is looked for among a few is what would be found among all."""

import math

import numpy as np
import pytest
import torch

from sparing.accel import reduce_bodies
from sparing.accel.compiled import select_loops
from sparing.accel.reduce_bodies import DRAWN, scarce
from sparing.core.keys import choose, hashes
from sparing.core.reduce import keep_largest, largest_in_rows
from support import make_ctx


@pytest.mark.parametrize("k", [1, 1000, DRAWN, 2 * DRAWN - 7])
def test_the_narrow_band_selects_what_a_full_sort_selects(k):
    d = 2 * DRAWN + 13
    key = make_ctx([5]).keys("m")
    order = hashes(key, d)[0].argsort()[:k]
    want = torch.zeros(d, dtype=torch.bool).index_fill(0, order, True)
    assert torch.equal(choose(key, d, k)[0], want)


def test_a_band_that_misses_the_cut_falls_back_to_sorting(monkeypatch):
    d, k = DRAWN + 5, 1000
    key = make_ctx([5]).keys("m")
    want = choose(key, d, k)
    monkeypatch.setattr("sparing.accel.reduce_bodies._word_at", lambda u: -(1 << 63))
    assert torch.equal(choose(key, d, k), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["normal", "ties", "sorted", "few", "nan", "infinite", "zeros", "negative zeros"])
def test_a_sample_changes_nothing(kind, dtype, monkeypatch):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5000, generator=g) if kind != "ties" else torch.randint(-3, 4, (3, 5000), generator=g).float()
    if kind == "sorted":
        x = x.sort(dim=1).values
    if kind == "few":
        x = x.where(torch.rand(x.shape, generator=g) < 0.01, 0)
    if kind == "nan":
        x[1, 7], x[1, 99] = math.nan, -math.nan
    if kind == "infinite":
        x[1, 7], x[1, 99] = math.inf, -math.inf
    if "zeros" in kind:
        x[:, 20:] = -0.0 if "negative" in kind else 0.0
    x = x.to(dtype)
    monkeypatch.setattr(reduce_bodies, "SAMPLED", 100)
    monkeypatch.setattr(reduce_bodies, "SAMPLE", 64)
    monkeypatch.setattr(reduce_bodies, "BLOCK", 999)
    for k in (0, 1, 2, 30, 600, 4999, 5000, 6000, torch.tensor([0, 5, 4000])):
        want = largest_in_rows.plain(x, k)
        assert torch.equal(largest_in_rows(x, k), want)
        ((mask, kept),) = keep_largest([x], [k])
        assert torch.equal(mask, want)
        torch.testing.assert_close(kept, x.where(want, 0), rtol=0, atol=0, equal_nan=True)
        if isinstance(k, int):
            assert torch.equal(largest_in_rows(x[1:2], k), want[1:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sample_sees_every_column(dtype, monkeypatch):
    """Of a matrix whose columns a step of the sample would divide; columns that are all zero are common."""
    x = torch.randn(512, 3136, generator=torch.Generator().manual_seed(0))
    x[:, :: 512 * 3136 // reduce_bodies.SAMPLE] = 0
    looked_at, kth = [], reduce_bodies._kth
    monkeypatch.setattr(reduce_bodies, "_kth", lambda size, k: looked_at.append(len(size)) or kth(size, k))
    assert int(largest_in_rows(x.reshape(1, -1).to(dtype), 4096).sum()) == 4096
    assert max(looked_at, default=0) < 3 * 4096
    if dtype == torch.float32:
        bits, seen = x.reshape(-1).view(torch.int32).numpy(), np.empty(select_loops.DIGITS, np.int64)
        bound = select_loops.bound_of_sample(bits, 4096, seen)
        assert 4096 <= int((x.abs().view(torch.int32) >= int(bound)).sum()) < x.numel() // 16


def test_what_is_scarce(monkeypatch):
    mask = torch.zeros(80, dtype=torch.bool)
    mask[[3, 70, 79]] = True
    assert scarce(mask) is None
    monkeypatch.setattr(reduce_bodies, "LONG", 80)
    assert scarce(mask).tolist() == [3, 70, 79]
    assert scarce(torch.zeros(80, dtype=torch.bool)).tolist() == []
    assert scarce(torch.arange(80) < 10).tolist() == list(range(10))
    assert scarce(torch.arange(80) < 11) is None
