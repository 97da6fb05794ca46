import pytest
import torch

SHARES = torch.tensor([0.25, 0.5, 0.125], dtype=torch.float64)
MASKS = torch.tensor([[True, True, False], [True, False, False], [False, True, False]])


def votes(masks: torch.Tensor | None, shares: torch.Tensor = SHARES, like: torch.Tensor | None = None):
    cover = Cover()
    cover.add(masks, shares, shares.sum(), positive=False)
    return cover.votes(torch.zeros(1, 3) if like is None else like)


def test_one_mask_for_all_is_a_number_and_the_mask():
    weight, where = votes(MASKS[:1])
    assert (float(weight), where.tolist()) == (0.875, MASKS[:1].tolist())
    weight, where = votes(MASKS[1:2].expand(3, -1))
    assert (float(weight), where.tolist()) == (0.875, MASKS[1:2].tolist())


def test_without_weight_there_is_no_vote():
    weight, where = votes(MASKS[:1], torch.zeros(3, dtype=torch.float64))
    assert not weight.any()
    assert not where.any()


def test_masks_that_differ_are_added_up():
    weight, where = votes(MASKS)
    assert weight.tolist() == [[0.75, 0.375, 0.0]]
    assert where.tolist() == [[True, True, False]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_votes_are_those_of_the_cpu():
    g = torch.Generator().manual_seed(0)
    masks = torch.rand(50, 40_000, generator=g) < 0.3
    shares = torch.randint(0, 1 << 29, (50,), generator=g).double() * 2.0**-35
    like = torch.zeros(1, 40_000)
    for here, there in zip(votes(masks, shares, like), votes(masks.cuda(), shares, like.cuda()), strict=True):
        assert torch.equal(there.cpu(), here)
