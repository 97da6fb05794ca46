"""Normal numbers from words: their distribution, and that a row is always the same row."""

import math

import pytest
import torch

from sparing.core.gaussian import _log, exact_root, fresh_words, keyed_words, normals_from_words, standard_normal
from support import changed, make_ctx


def test_they_are_normal():
    n = 400_000
    x = standard_normal(keyed_words, make_ctx([3, 8]), "a", n)
    for row in x:
        assert abs(float(row.mean())) < 5 / math.sqrt(n)
        assert abs(float(row.var()) - 1) < 5 * math.sqrt(2 / n)
        assert abs(float((row**4).mean()) - 3) < 5 * math.sqrt(96 / n)
        cdf = 0.5 * (1 + torch.erf(row.sort().values / math.sqrt(2)))
        places = (torch.arange(n, dtype=torch.float64) + 0.5) / n
        assert float((cdf - places).abs().max()) < 2 / math.sqrt(n)  # Kolmogorov-Smirnov, one in a thousand
    half = n // 2
    pairs = [(x[0], x[1]), (x[0][:half], x[0][half:]), (x[0][:-1], x[0][1:]), (x[0][:half] ** 2, x[0][half:] ** 2)]
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 5 / math.sqrt(len(a))


def test_rows_are_as_alone_and_tags_rounds_and_clients_differ():
    ctx = make_ctx([3, 8, 1])
    x = standard_normal(keyed_words, ctx, "a", 77)
    for k in range(3):
        assert torch.equal(standard_normal(keyed_words, ctx.at(slice(k, k + 1)), "a", 77), x[k : k + 1])
    others = [standard_normal(keyed_words, ctx, "b", 77), standard_normal(keyed_words, ctx._replace(round=2), "a", 77)]
    assert all(not bool((x == other).any()) for other in others)
    assert not bool((x[0] == x[1]).any())


def test_any_number_of_them():
    ctx = make_ctx([0])
    assert [standard_normal(keyed_words, ctx, "a", n).shape[1] for n in (0, 1, 2, 7)] == [0, 1, 2, 7]


def test_the_transform_is_box_mullers_even_at_the_ends():
    top, bottom = -1, 0  # all bits set, none
    words = torch.tensor([[top, bottom, 5 << 40, top, bottom, 3]])
    x = normals_from_words(words, 6)
    assert torch.isfinite(x).all()
    assert float(x.abs().max()) < 8.7
    first, second = words.chunk(2, dim=1)
    unit = lambda w: ((w >> 12 & (1 << 52) - 1).double() + 0.5) / 2**52  # noqa: E731
    radius, angle = (-2 * unit(first).log()).sqrt(), (unit(second) - 0.5 + (second & 3)) * math.pi / 2
    torch.testing.assert_close(x, torch.cat([radius * angle.cos(), radius * angle.sin()], 1), rtol=0, atol=1e-14)


def test_the_logarithm():
    u = torch.cat([torch.linspace(1e-6, 1 - 1e-9, 5001, dtype=torch.float64), torch.tensor([2.0**-53]).double()])
    torch.testing.assert_close(_log(u), u.log(), rtol=0, atol=1e-14)


def test_the_root_is_correctly_rounded():
    x = 75 * torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert exact_root(x).tolist() == [math.sqrt(value) for value in x.tolist()]


def test_secret_ones_never_come_again():
    ctx = make_ctx([0, 1])
    a, b = (standard_normal(fresh_words, ctx, "a", 50, torch.zeros(len(ctx.ids), 50)) for _ in range(2))
    assert a.shape == (2, 50)
    assert not bool((a == b).any())
    assert abs(float(standard_normal(fresh_words, ctx, "a", 50_000, torch.zeros(len(ctx.ids), 1)).std()) - 1) < 0.02


@pytest.mark.gpu
def test_a_gpu_gives_the_same_bits():
    ctx = make_ctx([3, 8])
    there = changed(ctx, device="cuda")
    assert torch.equal(
        standard_normal(keyed_words, there, "a", 300_001).cpu(), standard_normal(keyed_words, ctx, "a", 300_001)
    )
