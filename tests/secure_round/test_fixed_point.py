"""Numbers of clients, added without rounding."""

import random
from fractions import Fraction

import pytest

from sparing.core.errors import TrainingError
from sparing.core.grid import WEIGHT_GRID
from sparing.secure_round import fixed_point as fixed


@pytest.mark.parametrize("seed", range(20))
def test_means_do_not_depend_on_the_order_and_are_right(seed):
    rng = random.Random(seed)
    n = rng.randrange(3, 40)
    shares = [rng.randrange(1, 2**24) * WEIGHT_GRID for _ in range(n)]
    numbers = [rng.uniform(-1, 1) * 10.0 ** rng.randrange(-6, 12) for _ in range(n)]
    wanted = sum(Fraction(w) * Fraction(x) for w, x in zip(shares, numbers, strict=True)) / sum(map(Fraction, shares))
    order = rng.sample(range(n), n)
    found = {
        fixed.weighed_mean(shares, numbers, "loss"),
        fixed.weighed_mean([shares[i] for i in order], [numbers[i] for i in order], "loss"),
    }
    assert len(found) == 1
    assert found.pop() == pytest.approx(float(wanted), rel=1e-12, abs=2**-60)


def test_the_largest_sum_still_has_its_sign():
    """As many clients as a sum may have, with all the weight there is, and the largest number that is taken."""
    largest = 2.0**63
    total = sum(fixed.weighed_fixed(2.0**-16, -largest, "loss") for _ in range(4)) * 2**14
    assert total >= -(2 ** (fixed.NUMBER_BITS - 1))
    assert fixed.mean_of_sum(total, fixed.whole_share(1.0)) == -largest


@pytest.mark.parametrize("x", [float("nan"), float("inf"), -float("inf"), 2.0**64])
def test_what_is_no_number_is_refused_unless_it_counts_for_nothing(x):
    with pytest.raises(TrainingError, match=r"loss is .*; lower local.lr"):
        fixed.to_fixed(x, "loss")
    assert fixed.weighed_fixed(0.0, x, "loss") == 0


def test_of_nobody_there_is_no_mean():
    assert fixed.mean_of_sum(0, 0) != fixed.mean_of_sum(0, 0)


@pytest.mark.parametrize("seed", range(5))
def test_losses_are_weighed_by_samples(seed):
    rng = random.Random(seed)
    n = [rng.randrange(1, 10**6) for _ in range(30)]
    losses = [rng.expovariate(1) for _ in n]
    total = sum(fixed.sample_weighed(count, x, "loss") for count, x in zip(n, losses, strict=True))
    wanted = sum(count * Fraction(x) for count, x in zip(n, losses, strict=True)) / sum(n)
    assert fixed.mean_over_samples(total, sum(n)) == pytest.approx(float(wanted), rel=1e-15)


def test_weights_come_back_from_the_sum_of_weights_times_one():
    shares = [i * WEIGHT_GRID for i in (1, 5, 2**28)]
    assert fixed.whole_of_sum(sum(fixed.weighed_fixed(share, 1.0, "weight") for share in shares)) == 6 + 2**28
