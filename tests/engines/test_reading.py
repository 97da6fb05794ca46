"""Requirements are judged at once, or together with all else that is read of a round."""

from collections import ChainMap

import pytest
import torch

from sparing.accel.awaited import Awaited
from sparing.core.context import Requirement
from sparing.core.errors import TrainingError
from sparing.engines.outcome import read_later
from support import make_ctx


def at_most_one(values: torch.Tensor) -> Requirement:
    return Requirement(values <= 1, lambda: TrainingError(str(values.tolist())))


def test_without_a_list_a_requirement_is_judged_at_once():
    ctx = make_ctx([1])
    ctx.require(*at_most_one(torch.tensor([0, 1])))
    with pytest.raises(TrainingError, match=r"\[2\]"):
        ctx.require(*at_most_one(torch.tensor([2])))


def test_words_are_a_warning():
    ctx = make_ctx([1])
    ctx.require(torch.tensor(True), lambda: "all is well")
    with pytest.warns(UserWarning, match="much is lost"):
        ctx.require(torch.tensor([True, False]), lambda: "much is lost")


def test_a_list_is_judged_later_and_then_holds_nothing():
    asked, ctx = [], make_ctx([1])
    ctx = ctx._replace(workspace=ctx.workspace._replace(requirements=asked))
    ctx.require(torch.ones(2, 3, dtype=torch.bool), lambda: TrainingError("never"))
    ctx.at(slice(0, 1)).require(torch.tensor(False), lambda: "much is lost")
    read = read_later(asked, [])
    assert len(asked) == 2
    with pytest.warns(UserWarning, match="much is lost"):
        read()
    assert asked == []  # nothing of the round is held any more
    assert read_later([], [])() == ([], {})


def test_the_first_that_does_not_hold_is_told():
    asked = [at_most_one(torch.tensor([value])) for value in (1, 3, 2)]
    with pytest.raises(TrainingError, match=r"\[3\]"):
        read_later(asked, [])()
    assert asked == []


def test_reports_are_numbers_at_last_and_later_ones_win():
    waited = Awaited(lambda: {"fallbacks": 2.0, "kept": torch.tensor(0.5)})
    first, second = {"coverage": torch.tensor(0.25).double(), "kept": 1.0}, {"kept": torch.tensor(3)}
    settled = ChainMap(waited, second, first)  # pyright: ignore
    losses, report = read_later([], [torch.tensor([1.5, 2.5])], settled, {"apart": torch.tensor(float("nan"))})()
    assert [x.tolist() for x in losses] == [[1.5, 2.5]]
    assert report == {"coverage": 0.25, "kept": 0.5, "fallbacks": 2.0}, "what is not a number is left out"
    assert all(isinstance(x, float) for x in report.values())


@pytest.mark.gpu
def test_values_may_lie_here_and_there():
    asked = [at_most_one(torch.full((2,), x, device=device)) for x, device in ((1, "cuda"), (0, "cpu"), (3, "cuda"))]
    with pytest.raises(TrainingError, match=r"\[3, 3\]"):
        read_later(asked, [])()
    losses = [torch.ones(2, device="cuda"), torch.zeros(1)]
    found, report = read_later([], losses, {"here": torch.tensor(2), "there": torch.tensor(4.5, device="cuda")})()
    assert [x.tolist() for x in found] == [[1.0, 1.0], [0.0]]
    assert report == {"here": 2.0, "there": 4.5}
