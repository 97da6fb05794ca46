import pytest
import torch

from sparing.parts.code.budget.subspace import Planes, every_component, strongest_subspace, whole_product

SIDES = ((50, 999), (50, 999), (999, 30))


def start(k, n, r, seed=0):
    return torch.rand(k, n, r, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def falling(k, m, n, seed=0, rate=0.7):
    """Random matrices whose singular values fall by a factor."""
    g = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(k, side, min(m, n), generator=g, dtype=torch.float64)).Q for side in (m, n))
    return (u * rate ** torch.arange(min(m, n))) @ v.mT


@pytest.mark.parametrize(("m", "n"), [(40, 12), (300, 12), (7, 7)])
def test_all_components_of_a_small_matrix_are_those_of_its_decomposition(m, n):
    x = torch.randn(2, m, n, generator=torch.Generator().manual_seed(1))
    r = min(m, n)
    ways = {3e-4: strongest_subspace(x, start(2, n, n), r, 2), 1e-5: every_component(x, r)}
    for tolerance, found in ways.items():
        assert torch.allclose(found.s, torch.linalg.svdvals(x.double()), rtol=tolerance)
        assert torch.allclose((found.u * found.s[:, None]) @ found.v.mT, x.double(), atol=tolerance)
        for vectors in (found.u, found.v):
            assert torch.allclose(
                vectors.mT @ vectors, torch.eye(r, dtype=torch.float64).expand(2, -1, -1), atol=tolerance
            )


def test_the_strongest_of_a_large_one_are_found_from_any_start():
    x = falling(1, 300, 80)
    best = torch.linalg.svdvals(x)
    found = strongest_subspace(x, start(1, 80, 18), 10, 2)
    assert found.s.shape == (1, 10)
    assert torch.allclose(found.s[:, :8], best[:, :8], rtol=1e-3)
    assert bool((found.s <= best[:, :10] * (1 + 1e-3)).all())
    once = strongest_subspace(x, start(1, 80, 10), 10, 1)
    assert (
        float(once.s.square().sum()) < float(found.s.square().sum()) < float(best[:, :10].square().sum()) * (1 + 1e-4)
    )


@pytest.mark.parametrize("tail", [1.0, 30.0, 300.0])
def test_what_is_lost_is_within_a_few_percent_of_the_least(tail):
    """Also where a few entries are so large that few bits tell little of the others."""
    x = falling(3, 400, 90, rate=0.95) + 0.02 * torch.randn(3, 400, 90, generator=torch.Generator().manual_seed(5))
    x[:, :3, :3] *= tail
    best = torch.linalg.svdvals(x)[:, :20].square().sum(1)
    found = strongest_subspace(x, start(3, 90, 28), 20, 2)
    left = (x - (found.u * found.s[:, None]) @ found.v.mT).square().sum((1, 2))
    assert bool((left / (x.square().sum((1, 2)) - best) < 1.05).all())


def test_whole_products_are_exact():
    g = torch.Generator().manual_seed(6)
    high, low, codes = (torch.randint(-127, 128, (2, *sides), generator=g).to(torch.int8) for sides in SIDES)
    high[0], codes[0] = 127, -127
    wanted = (254 * high.long() + low) @ codes.long()
    assert torch.equal(whole_product(Planes(high, low, torch.ones(2, 1, 1)), codes).long(), wanted)


def test_row_k_has_the_bits_of_that_row_alone_at_any_number_of_threads():
    x, first = falling(5, 200, 60, seed=3), start(5, 60, 20, seed=4)
    together, whole = strongest_subspace(x, first, 12, 2), every_component(x, 12)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for k in range(5):
                alone = strongest_subspace(x[k : k + 1], first[k : k + 1], 12, 2)
                for one, all_ in zip((*alone, *every_component(x[k : k + 1], 12)), (*together, *whole), strict=True):
                    assert torch.equal(one[0], all_[k])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_what_is_not_there_is_zero_and_what_is_not_a_number_stays_so():
    x = torch.zeros(4, 9, 6)
    x[1] = torch.arange(9.0)[:, None] * torch.arange(6.0)  # rank one
    x[2, 3, 4], x[3, 3, 4] = float("nan"), float("inf")
    for found in (strongest_subspace(x, start(4, 6, 6), 4, 2), every_component(x, 4)):
        assert not found.s[0].any()
        assert not found.u[0].any()
        assert (found.s[1] > 0).tolist() == [True, False, False, False]
        assert found.s[2:].isnan().all()
