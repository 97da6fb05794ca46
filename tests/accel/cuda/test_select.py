import math

import pytest
import torch

from sparing.core.keys import choose
from sparing.core.reduce import keep_largest, largest_in_rows
from support import changed, make_ctx

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
    counts = list(some.unbind(1)) if k is None else [k] * len(LENGTHS)
    parts = list(x.split(LENGTHS, 1))
    there = [part.cuda() for part in parts]
    far = [n if isinstance(n, int) else n.cuda() for n in counts]
    plain, found = keep_largest.plain(parts, counts), keep_largest(there, far)
    alone = keep_largest([part[1:2] for part in there], [n if isinstance(n, int) else n[1:2] for n in far])
    for part, (mask, _), (got, kept), (one, _) in zip(parts, plain, found, alone, strict=True):
        assert torch.equal(got.cpu(), mask)
        assert torch.equal(one.cpu(), mask[1:2])
        assert torch.equal(kept.cpu().nan_to_num(7.0), torch.where(mask, part, 0.0).nan_to_num(7.0))


def test_one_k_for_all_rows_and_other_numbers():
    x = values("ties")[:, :5000]
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8):
        assert torch.equal(largest_in_rows(x.to("cuda", dtype), 700).cpu(), largest_in_rows(x.to(dtype), 700))


@pytest.mark.parametrize(("d", "k"), [(1, 1), (10, 0), (10, 3), (5000, 4999), (300_000, 1), (1_000_003, 400_000)])
def test_what_is_chosen_is_what_the_cpu_chooses(d, k):
    ctx = make_ctx([3, 8, 11])
    keys = changed(ctx, device="cuda").keys("m")
    assert keys.is_cuda
    assert torch.equal(keys.cpu(), ctx.keys("m"))
    assert torch.equal(choose(keys, d, k).cpu(), choose(ctx.keys("m"), d, k))
    assert torch.equal(choose(keys[1:2], d, k).cpu(), choose(ctx.keys("m"), d, k)[1:2])


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_words_that_share_all_digits_looked_for_are_told_apart(passes, monkeypatch):
    from sparing.accel.cuda import select

    monkeypatch.setattr(select, "PASSES", passes)
    ctx = make_ctx([3, 8, 11])
    keys = ctx.keys("m").cuda()
    for d, k in ((10, 3), (5000, 2500), (70_000, 1)):
        assert torch.equal(choose(keys, d, k).cpu(), choose(ctx.keys("m"), d, k))
