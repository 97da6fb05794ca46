import pytest
import torch

from sparing.core.votes import Votes, _divisor_of, divide_by_votes

SHARES = torch.tensor([0.25, 0.5, 0.125], dtype=torch.float64)
MASKS = torch.tensor([[True, True, False], [True, False, False], [False, True, False]])
LIKE = torch.zeros(1, 3)


def voted(masks: torch.Tensor | None, shares: torch.Tensor = SHARES) -> Votes:
    votes = Votes()
    votes.add(masks, shares, shares.sum())
    return votes


def test_one_mask_for_all_is_a_number_and_the_mask():
    weight, where = _divisor_of(voted(MASKS[:1]), LIKE)
    assert (float(weight), where.tolist()) == (0.875, MASKS[:1].tolist())
    weight, where = _divisor_of(voted(MASKS[1:2].expand(3, -1)), LIKE)
    assert (float(weight), where.tolist()) == (0.875, MASKS[1:2].tolist())


def test_without_weight_there_is_no_vote():
    for masks in (None, MASKS[:1], MASKS):
        weight, where = _divisor_of(voted(masks, torch.zeros(3, dtype=torch.float64)), LIKE)
        assert not where.any()
        assert (weight == 1).all(), "so that a sum of nothing stays nothing"


def test_masks_that_differ_are_added_up():
    votes = voted(MASKS)
    assert votes.dense.tolist() == [[0.75, 0.375, 0.0]]
    weight, where = _divisor_of(votes, LIKE)
    assert weight.tolist() == [[0.75, 0.375, 1.0]]
    assert where.tolist() == [[True, True, False]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_one_by_one_and_merged_they_are_the_same(order):
    one, other = Votes(), Votes()
    for k in order:
        into = one if k < 2 else other
        into.add(MASKS[k : k + 1], SHARES[k : k + 1], SHARES[k])
    assert torch.equal(one.merge(other).dense, voted(MASKS).dense)
    everywhere = voted(None).merge(voted(MASKS[:1]))
    assert everywhere.dense.tolist() == [[1.75, 1.75, 0.875]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["apart", "one mask", "everywhere", "nobody", "weighed there"])
def test_votes_are_those_of_the_cpu(kind):
    g = torch.Generator().manual_seed(0)
    drawn = torch.rand(50, 40_000, generator=g) < 0.3
    masks = {"apart": drawn, "one mask": drawn[:1]}.get(kind)
    shares = torch.randint(0, 1 << 29, (50,), generator=g).double() * 2.0**-35
    shares = shares * 0 if kind == "nobody" else shares
    sums = torch.randn(1, 40_000, generator=g, dtype=torch.float64)
    sums = sums if masks is None else sums * masks.any(0, keepdim=True)
    there_K = shares.cuda() if kind == "weighed there" else shares
    here, covered = divide_by_votes({"w": sums.clone()}, {"w": voted(masks, shares)})
    there, far = divide_by_votes({"w": sums.cuda()}, {"w": voted(None if masks is None else masks.cuda(), there_K)})
    assert torch.equal(there["w"].cpu(), here["w"])
    where, wanted = (torch.ones_like(sums, dtype=torch.bool) if x is None else x for x in (far["w"], covered["w"]))
    assert torch.equal(where.cpu(), wanted.expand_as(sums))
