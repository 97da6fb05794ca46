import pytest
import torch

from sparing.accel.cuda import carried_together

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda")


@pytest.mark.parametrize("x", [torch.arange(6).view(2, 3).T, torch.tensor(2.5), torch.zeros(0)])
def test_what_is_carried_arrives(x):
    far = carried(x, GPU)
    assert far.is_cuda
    assert torch.equal(far.cpu(), x.cpu())


def test_what_is_carried_may_be_overwritten_at_once():
    torch.ones(1 << 24, device=GPU).sort()  # so that the device is busy
    x = torch.arange(1 << 16)
    far = carried(x, GPU)
    x.zero_()
    for _ in range(9):
        carried(x, GPU)
    assert torch.equal(far.cpu(), torch.arange(1 << 16))


def test_rows_arrive_together():
    rows = (torch.tensor([3, 5, 9, 2])[::2], torch.tensor([-1, 7]), torch.tensor([True, False]))
    far = carried_together(rows, GPU)
    assert all(a.is_cuda and a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(far, rows, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in far}) == 1
