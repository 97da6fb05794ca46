import math

import pytest
import torch

from sparing.core.keys import choose
from sparing.core.reduce import kept_of_each, largest, largest_of_each
from support import make_ctx

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS = (20_000, 1, 8192, 8193, 70, 0, 300_000)


def values(kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, sum(LENGTHS), generator=g)
    if kind == "ties":
        return torch.randint(-3, 4, x.shape, generator=g).float()
    if kind == "zeros":
        return x.masked_fill(torch.rand(x.shape, generator=g) < 0.95, 0.0)
    if kind == "tiny":
        return x * 1e-42
    if kind == "nan":
        x[0, :30], x[1, 5], x[2, 40:50] = math.nan, math.nan, -math.inf
        x[2, 50:55] = math.nan
    return x


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "tiny", "nan"])
@pytest.mark.parametrize("k", [0, 1, 12, 70, 8192, 10**6, None])
def test_the_largest_are_those_of_the_cpu(kind, k):
    x = values(kind)
    some = torch.randint(0, 9000, (3, len(LENGTHS)), generator=torch.Generator().manual_seed(1))
    wanted = some if k is None else torch.full_like(some, k)
    plain = largest_of_each(x, LENGTHS, wanted)
    assert torch.equal(largest_of_each(x.cuda(), LENGTHS, wanted.cuda()).cpu(), plain)
    assert torch.equal(largest_of_each(x[1:2].cuda(), LENGTHS, wanted[1:2].cuda()).cpu(), plain[1:2])
    kept = kept_of_each(x.cuda(), LENGTHS, wanted.cuda())[1].cpu()
    assert torch.equal(kept.nan_to_num(7.0), torch.where(plain, x, 0.0).nan_to_num(7.0))


def test_one_k_for_all_rows_and_other_numbers():
    x = values("ties")[:, :5000]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8):
        assert torch.equal(largest(x.to("cuda", dtype), 700).cpu(), largest(x.to(dtype), 700))


@pytest.mark.parametrize(("d", "k"), [(1, 1), (10, 0), (10, 3), (5000, 4999), (300_000, 1), (1_000_003, 400_000)])
def test_what_is_chosen_is_what_the_cpu_chooses(d, k):
    ctx = make_ctx([3, 8, 11])
    there = ctx._replace(ids=ctx.ids.cuda())
    keys = there.keys("m")
    assert torch.equal(keys.cpu(), ctx.keys("m"))
    assert torch.equal(choose(keys, d, k).cpu(), choose(ctx.keys("m"), d, k))
    assert torch.equal(choose(keys[1:2], d, k).cpu(), choose(ctx.keys("m"), d, k)[1:2])


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_words_that_share_all_digits_looked_for_are_told_apart(passes, monkeypatch):
    from sparing.accel.cuda import select

    monkeypatch.setattr(select, "PASSES", passes)
    ctx = make_ctx([3, 8, 11])
    keys = ctx._replace(ids=ctx.ids.cuda()).keys("m")
    for d, k in ((10, 3), (5000, 2500), (70_000, 1)):
        assert torch.equal(choose(keys, d, k).cpu(), choose(ctx.keys("m"), d, k))
