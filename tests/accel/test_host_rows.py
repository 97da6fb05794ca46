"""Loops over rows of the host: whom their threads may wait for, and what is left to the plain bodies."""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest
import torch

from sparing.accel.compiled import host_rows
from sparing.accel.compiled.host_rows import deal_rows
from sparing.core import ops, reduce, tree, votes
from sparing.core.reduce import Term
from sparing.core.threads import intra_op
from sparing.engines import divergence
from sparing.parts.code import dead_zone, fedscr
from sparing.storage import bank

MANY = 9000


def test_rows_are_looped_over_where_no_worker_ever_begins(monkeypatch):
    """As in a worker of these, or in the fork of a process that had some."""

    class Stuck(ThreadPoolExecutor):
        def submit(self, *args, **kwargs) -> Future:
            return Future()

    monkeypatch.setattr(host_rows, "host_workers", Stuck)
    seen = []
    with intra_op(3):
        deal_rows(lambda first, last: seen.append((first, last)), 7, MANY * 7)
    assert sorted(seen) == [(0, 2), (2, 4), (4, 7)]


def test_rows_are_waited_for_where_a_worker_has_begun(monkeypatch):
    with ThreadPoolExecutor(1) as pool, intra_op(2):
        monkeypatch.setattr(host_rows, "host_workers", lambda: pool)
        begun, out = Event(), [0] * 4

        def loop(first: int, last: int) -> None:
            if first:
                begun.set()
            else:
                begun.wait()
            out[first:last] = [1] * (last - first)

        deal_rows(loop, 4, MANY * 4)
    assert out == [1] * 4


def test_what_goes_wrong_in_a_worker_is_raised():
    def loop(first: int, last: int) -> None:
        if first:
            raise ValueError("in the second stretch")

    with intra_op(2), pytest.raises(ValueError, match="second stretch"):
        deal_rows(loop, 2, MANY * 4)


def test_a_value_that_all_clients_share_keeps_its_structures():
    value = torch.randn(1, 90, 70).expand(3, -1, -1)
    filters, channels = torch.rand(3, 90, 1) < 0.5, torch.rand(3, 1, 70) < 0.5
    for given in ((value, filters, channels), (value.clone(), filters[:1].expand(3, -1, -1), channels)):
        assert torch.equal(fedscr.keep_structures(*given), fedscr.keep_structures.plain(*given))


def test_nobody_has_a_sum_and_a_count_of_nothing():
    x = torch.zeros(0, 700)
    assert reduce.total(x).shape == reduce.total.plain(x).shape == (0,)
    found = reduce.count_true(x > 0)
    assert found.dtype == torch.int64
    assert found.shape == (0,)


def test_numbers_are_float32_whatever_new_tensors_are_by_default():
    x, codes, step = torch.randn(3, MANY), torch.ones(3, 5, dtype=torch.int8), torch.full((3,), 0.5)
    torch.set_default_dtype(torch.float64)
    try:
        found = reduce.peaks(x), dead_zone.values_of_codes(codes, step)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found[0], reduce.peaks.plain(x))
    assert torch.equal(found[1], dead_zone.values_of_codes.plain(codes, step))
    assert {y.dtype for y in found} == {torch.float32}


def test_gradients_come_through():
    x, mask = torch.randn(2, MANY, requires_grad=True), torch.rand(2, MANY) < 0.5
    squares = reduce.dots([Term(x)], 2).sum() + reduce.total(x).sum() + reduce.peaks(x).sum()
    moved = ops.increments({"w": x}, {"w": torch.zeros(1, MANY)}, {"w": mask})["w"]
    put = ops.overlay({"w": x}, {"w": torch.zeros(1, MANY)}, {"w": mask})["w"]
    steps = dead_zone.values_of_codes(mask.to(torch.int8), torch.ones(2, requires_grad=True))
    for y in (squares, steps, tree.cleared(x, mask), moved, put):
        assert y.requires_grad


WRONG = {
    "rows of a bank": lambda: bank.put_rows(torch.zeros(4, MANY), torch.tensor([1]), torch.ones(1, MANY // 2)),
    "place in a bank": lambda: bank.put_rows(torch.zeros(4, MANY), torch.tensor([4]), torch.ones(1, MANY)),
    "clients": lambda: divergence.difference_sums([(torch.ones(3, MANY), torch.ones(1, MANY))], 8),
    "width": lambda: divergence.difference_sums([(torch.ones(4, MANY // 2), torch.ones(1, MANY))], 4),
    "bases": lambda: ops.increments(
        {"w": torch.ones(4, MANY)}, {"w": torch.ones(3, MANY)}, {"w": torch.ones(4, MANY) > 0}
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_and_not_read_beyond_its_end(what):
    with pytest.raises((RuntimeError, IndexError)):
        WRONG[what]()


def test_votes_may_be_shares_of_votes():
    dense, scope, share = torch.zeros(1, MANY, dtype=torch.float64), torch.rand(3, MANY).round() / 2, torch.ones(3)
    plain = dense.clone()
    votes.add_votes.plain(plain, scope, share)
    votes.add_votes(dense, scope, share)
    assert torch.equal(dense, plain)


def test_codes_that_all_clients_share_may_have_steps_of_their_own():
    codes, step = torch.ones(1, 5, dtype=torch.int8), torch.arange(3.0)
    assert torch.equal(dead_zone.values_of_codes(codes, step), dead_zone.values_of_codes.plain(codes, step))
