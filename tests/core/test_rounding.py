import pytest
import torch

from sparing.parts.code.dead_zone import DEAD, TOP, codes_of, digits, reaching, rounded


def test_codes_are_the_nearest_multiples_with_a_dead_zone_around_every_middle():
    x = torch.linspace(-4, 4, 8001, dtype=torch.float64)[None]
    codes = codes_of(x, torch.tensor([0.5]))
    assert codes.dtype == torch.int8
    off = x / 0.5 - codes
    outward = torch.where(x < 0, -off, off)
    assert float(outward.max()) == pytest.approx(0.5 + DEAD, abs=0.01)
    assert float(outward.min()) == pytest.approx(-(0.5 - DEAD), abs=0.01)
    assert torch.equal(codes, -codes_of(-x, torch.tensor([0.5]))), "both signs alike"
    assert bool(((codes * 0.5 - x).abs() <= x.abs()).all()), "never further off than sending nothing"


def test_every_row_has_a_step_of_its_own_and_zero_means_nothing():
    x = torch.tensor([[1.0, -2.0], [1.0, -2.0], [0.0, 0.0]])
    assert codes_of(x, torch.tensor([1.0, 2.0, 0.0])).tolist() == [[1, -2], [0, -1], [0, 0]]


def test_a_step_grows_until_the_largest_code_reaches_the_largest_value():
    x = torch.tensor([[0.1, -500.0], [0.1, 5.0]], dtype=torch.float64)
    step = reaching(torch.tensor([1.0, 1.0], dtype=torch.float64), x)
    assert step.dtype == torch.float32
    assert float(step[0]) == pytest.approx(500 / TOP)
    assert float(step[1]) == 1
    assert codes_of(x, step).tolist() == [[0, -TOP], [0, 5]]
    assert reaching(torch.ones(1), torch.zeros(1, 0)).tolist() == [1]


@pytest.mark.parametrize("terms", [1, 2, 3, 100, 4096, 5000])
def test_products_of_rounded_matrices_are_exact_in_any_order(terms):
    g = torch.Generator().manual_seed(terms)
    bits = digits(terms)
    a = rounded(torch.randn(3, 4, terms, generator=g, dtype=torch.float64) * 1e-3, bits)
    b = rounded(torch.randn(3, terms, 5, generator=g, dtype=torch.float64) * 1e9, bits)
    order = torch.randperm(terms, generator=g)
    assert torch.equal(a @ b, a[:, :, order] @ b[:, order])
    for k in range(3):
        assert torch.equal((a @ b)[k], a[k] @ b[k])
    worst = torch.full((1, 1, terms), 1 - 2.0**-30, dtype=torch.float64)
    assert float((rounded(worst, bits) @ rounded(worst, bits).mT).item()) == terms


def test_rounding_keeps_so_many_bits_of_the_largest_of_a_row():
    x = torch.tensor([[1.0, 0.3], [1000.0, 0.3], [0.0, 0.0]], dtype=torch.float64)
    y = rounded(x, 10)
    assert y[:, 0].tolist() == [1, 1000, 0]
    assert float((y - x).abs()[0, 1]) <= 2.0**-10
    assert float(y[1, 1]) in (0.0, 1.0)
    assert torch.equal(rounded(-x, 10), -y)
    assert torch.equal(rounded(x[:, None].mT, 10), y[:, None].mT)
    assert rounded(torch.tensor([[1.0, float("nan")]], dtype=torch.float64), 10).isnan().any()
