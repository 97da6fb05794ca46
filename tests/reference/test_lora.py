"""Rounds of adapters by the library against NumPy, from the factors that clients were sent and sent back."""

import numpy as np
import pytest

from reference import lora as reference
from reference.lora_rounds import Play

COHORTS = [[0, 1, 2, 3], [1, 2, 5], [4, 3], [2]]
KERNELS = [None, (3, 2)]


@pytest.mark.parametrize("kernel", KERNELS)
def test_average_is_the_mean_of_each_factor(kernel):
    play = Play(kernel, rank=3)
    for ids in COHORTS:
        play.play(ids, chunk=2)
        b, a = reference.average(play.arrivals(ids, lambda rank: 16 / 3))
        assert np.allclose(play.factors()[0], b, rtol=0, atol=1e-9)
        assert np.allclose(play.factors()[1], a, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("scale", ["shared", "rank", "root"])
def test_freeze_a_averages_columns_over_those_who_have_them(kernel, scale):
    play = Play(kernel, ranks=[5, 2], blend="freeze-a", scale=scale)
    scale_of = {"shared": lambda r: 16 / 5, "rank": lambda r: 16 / r, "root": lambda r: 16 / r**0.5}[scale]
    for ids in COHORTS:
        old, a = play.factors()
        play.play(ids, chunk=2)
        assert np.allclose(
            play.factors()[0], reference.freeze_a(play.arrivals(ids, scale_of), old, scale_of(5)), atol=1e-9
        )
        assert (play.factors()[1] == a).all()


def test_freeze_a_at_equal_ranks_is_the_mean_of_products():
    play = Play(rank=3, blend="freeze-a").play([0, 2, 5])
    b, a = play.factors()
    found = reference.mean_product(play.arrivals([0, 2, 5], lambda rank: 16 / 3))
    assert np.allclose(reference.product(b, a, 16 / 3), found, atol=1e-8)
