import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparing.core.context import few_keys
from sparing.core.keys import GOLDEN, few_hashes, hashes, mix, signed, tag_word
from sparing.parts.size.capacity import by_capacity
from support import changed, make_ctx


@given(d=st.integers(1, 300), share=st.floats(0, 1), seed=st.integers(0, 10**9))
def test_choose_takes_exactly_k_and_every_row_is_as_alone(d, share, seed):
    k = round(share * d)
    ctx = make_ctx([3, 8, 11], seed=seed)
    mask = ctx.choose("m", d, k)
    assert (mask.sum(dim=1) == k).all()
    assert torch.equal(mask[1:2], ctx.at(slice(1, 2)).choose("m", d, k))


def test_draws_differ_between_tags_rounds_seeds_and_clients():
    long = "layer" * 40
    draws = [
        make_ctx([1]).choose(long + "a", 64, 32),
        make_ctx([1]).choose(long + "b", 64, 32),
        make_ctx([2]).choose(long + "a", 64, 32),
        make_ctx([1], t=2).choose(long + "a", 64, 32),
        make_ctx([1], seed=1).choose(long + "a", 64, 32),
        make_ctx([1]).common.choose(long + "a", 64, 32),
    ]
    assert len({tuple(d.flatten().tolist()) for d in draws}) == len(draws)


def test_uniform_is_uniform():
    u = make_ctx(list(range(20))).uniform("u", 10_000)
    assert ((u >= 0) & (u < 1)).all()
    assert abs(float(u.mean()) - 0.5) < 5 / math.sqrt(12 * u.numel())
    counts = torch.histc(u, bins=50, min=0, max=1)
    chi2 = float(((counts - 4000) ** 2 / 4000).sum())
    assert chi2 < 49 + 6 * math.sqrt(2 * 49)


def test_every_position_is_chosen_equally_often():
    hits = torch.stack([make_ctx([0], t=t).choose("m", 50, 10)[0] for t in range(4000)]).float().mean(dim=0)
    assert (hits - 0.2).abs().max() < 5 * math.sqrt(0.2 * 0.8 / 4000)


def test_draws_do_not_depend_on_threads():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = make_ctx([1, 2]).choose("m", 300_000, 1000), make_ctx([1, 2]).uniform("u", 300_000)
        torch.set_num_threads(2)
        two = make_ctx([1, 2]).choose("m", 300_000, 1000), make_ctx([1, 2]).uniform("u", 300_000)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_the_numbers_never_change():
    """Both ends of a federation may run different releases: these words are part of the protocol."""
    assert make_ctx([7], seed=1, t=2).keys("psfed").tolist() == [-2624255705772447427]
    assert hashes(torch.tensor([1]), 3).tolist() == [[-7995527694508729151, -4689498862643123097, -534904783426661026]]


def test_choosing_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match="cannot choose 5 of 4"):
        make_ctx([1]).choose("m", 4, 5)


def test_capacities_go_along_with_their_clients():
    ctx = changed(make_ctx([4, 7, 9]), capacity={"rank": torch.tensor([0.25, 1.0, 0.5])})
    assert by_capacity([1, 0.5, 0.25], "rank")(ctx.at(torch.tensor([2, 0]))).tolist() == [1, 2]
    assert by_capacity([1, 0.5, 0.25], "rank")(ctx.at(slice(1, 3))).tolist() == [0, 1]
    assert ctx.common.capacity is None


def test_few_numbers_are_the_same_in_numpy():
    ctx = make_ctx([5, 2**40, 7])
    assert few_keys(ctx, "a", "b").view(np.int64).tolist() == [ctx.keys("a").tolist(), ctx.keys("b").tolist()]
    plain = mix(mix(ctx.ids * signed(GOLDEN) + 1) ^ signed(tag_word(ctx.seed, ctx.round, "a")))
    assert torch.equal(ctx.keys("a"), plain)
    assert few_hashes(few_keys(ctx, "a")[0], 9).view(np.int64).tolist() == hashes(plain, 9).tolist()
