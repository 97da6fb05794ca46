import pytest
import torch

from sparing.core.ops import constants, place, to_host

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda")


@pytest.mark.parametrize("x", [torch.arange(6).view(2, 3).T, torch.tensor(2.5), torch.zeros(0)])
def test_what_is_placed_arrives(x):
    far = place(x, GPU)
    assert far.is_cuda
    assert torch.equal(far.cpu(), x.cpu())
    assert torch.equal(place(far, torch.device("cpu")), x)


def test_what_is_placed_may_be_overwritten_at_once():
    torch.ones(1 << 24, device=GPU).sort()  # so that the device is busy
    x = torch.arange(1 << 16)
    far = place(x, GPU)
    x.zero_()
    for _ in range(9):
        place(x, GPU)
    assert torch.equal(far.cpu(), torch.arange(1 << 16))


def test_constants_are_brought_there_once():
    assert constants((3, 5), GPU).tolist() == [3, 5]
    assert constants((3, 5), GPU) is constants((3, 5), GPU)


def test_numbers_of_all_kinds_come_in_one_copy():
    """Also those that stand apart in memory, are one number, or none."""
    whole = torch.arange(15.0, device=GPU).view(5, 3)
    odd = (whole[:, 0], whole.int().T, whole > 2, whole.double()[1:, 1], whole.sum(), whole[:0], whole.bfloat16()[:1])
    odd = (*odd, torch.ones(2), whole.long()[:, 1:])
    came = to_host(odd)()
    assert not any(x.is_cuda for x in came)
    assert all(a.dtype == b.dtype and torch.equal(a, b.cpu()) for a, b in zip(came, odd, strict=True))
