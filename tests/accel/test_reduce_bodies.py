"""Long rows on a CPU: what is looked for among a few is what would be found among all."""

import math

import pytest
import torch

from sparing.accel import reduce_bodies
from sparing.accel.reduce_bodies import DRAWN, scarce
from sparing.core.keys import choose, hashes
from sparing.core.reduce import largest_in_rows
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


@pytest.mark.parametrize("kind", ["normal", "ties", "sorted", "nan", "zeros"])
def test_a_sample_changes_nothing(kind, monkeypatch):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(3, 5000, generator=g) if kind != "ties" else torch.randint(-3, 4, (3, 5000), generator=g).float()
    if kind == "sorted":
        x = x.sort(dim=1).values
    if kind == "nan":
        x[1, 7] = math.nan
    if kind == "zeros":
        x[:, 20:] = 0
    plain = {k: largest_in_rows(x, k) for k in (0, 1, 30, 600, 4999, 5000)}
    mixed = largest_in_rows(x, torch.tensor([0, 5, 4000]))
    monkeypatch.setattr(reduce_bodies, "SAMPLED", 100)
    monkeypatch.setattr(reduce_bodies, "SAMPLE", 64)
    monkeypatch.setattr(reduce_bodies, "BLOCK", 999)
    for k, wanted in plain.items():
        assert torch.equal(largest_in_rows(x, k), wanted)
        assert torch.equal(largest_in_rows(x[1:2], k), wanted[1:2])
    assert torch.equal(largest_in_rows(x, torch.tensor([0, 5, 4000])), mixed)


def test_a_sample_sees_every_column(monkeypatch):
    """Of a matrix whose columns a step of the sample would divide; columns that are all zero are common."""
    x = torch.randn(512, 3136, generator=torch.Generator().manual_seed(0))
    x[:, :: 512 * 3136 // reduce_bodies.SAMPLE] = 0
    looked_at, kth = [], reduce_bodies._kth
    monkeypatch.setattr(reduce_bodies, "_kth", lambda size, k: looked_at.append(len(size)) or kth(size, k))
    assert int(largest_in_rows(x.reshape(1, -1), 4096).sum()) == 4096
    assert max(looked_at) < 3 * 4096


def test_what_is_scarce(monkeypatch):
    mask = torch.zeros(80, dtype=torch.bool)
    mask[[3, 70, 79]] = True
    assert scarce(mask) is None
    monkeypatch.setattr(reduce_bodies, "LONG", 80)
    assert scarce(mask).tolist() == [3, 70, 79]
    assert scarce(torch.zeros(80, dtype=torch.bool)).tolist() == []
    assert scarce(torch.arange(80) < 10).tolist() == list(range(10))
    assert scarce(torch.arange(80) < 11) is None
