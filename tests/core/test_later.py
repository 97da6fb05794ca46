"""Doubts are judged at once, or together when somebody asks."""

import pytest
import torch
from sparing.core.later import asked, doubt


def refuse(values: torch.Tensor) -> None:
    if bool((values > 1).any()):
        raise ValueError(str(values.tolist()))


def test_without_a_list_a_doubt_is_judged_at_once():
    doubt(None, torch.tensor([0, 1]), refuse)
    with pytest.raises(ValueError, match=r"\[2\.0\]"):
        doubt(None, torch.tensor([2]), refuse)


def test_a_list_is_judged_in_turn_and_in_the_shapes_it_came_in():
    seen, doubts = [], []
    doubt(doubts, torch.ones(2, 3, dtype=torch.int64), seen.append)
    doubt(doubts, torch.tensor(4.5), seen.append)
    judged = asked(doubts)
    assert seen == []
    judged()
    assert [x.tolist() for x in seen] == [[[1.0] * 3] * 2, 4.5]
    assert doubts == []  # nothing of the round is held any more
    asked([])()


def test_the_first_that_is_refused_is_told():
    doubts = []
    for value in (1, 3, 2):
        doubt(doubts, torch.tensor([value]), refuse)
    with pytest.raises(ValueError, match=r"3\.0"):
        asked(doubts)()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_values_may_lie_here_and_there():
    seen, doubts = [], []
    for value, device in ((1, "cuda"), (2, "cpu"), (3, "cuda")):
        doubt(doubts, torch.full((2,), value, device=device), lambda x: seen.append(x.tolist()))
    asked(doubts)()
    assert seen == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_of_all_kinds_come_in_one_copy():
    """Also those that stand apart in memory, are one number, or none."""
    whole, seen, doubts = torch.arange(15.0, device="cuda").view(5, 3), [], []
    odd = (whole[:, 0], whole.int().T, whole > 2, whole.double()[1:, 1], whole.sum(), whole[:0], whole.bfloat16()[:1])
    for values in odd:
        doubt(doubts, values, seen.append)
    asked(doubts)()
    assert all(torch.equal(mine, values.double().cpu()) for mine, values in zip(seen, odd, strict=True))
