import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparing.core.reduce import largest_in_rows, total

values = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=70)


@given(values, values)
def test_rows_are_as_alone(a, b):
    n = min(len(a), len(b))
    x = torch.tensor([a[:n], b[:n]])
    assert torch.equal(total(x)[1:], total(x[1:]))
    np.testing.assert_allclose(total(x)[0], np.sum(np.array(a[:n], dtype=np.float64)), rtol=1e-12, atol=1e-6)


def test_long_rows_are_as_alone_at_any_thread_count():
    x = torch.randn(5, 200_001)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        many = total(x)
        torch.set_num_threads(1)
        for k in range(5):
            assert torch.equal(many[k : k + 1], total(x[k : k + 1]))
    finally:
        torch.set_num_threads(before)


def test_an_empty_row_sums_to_zero():
    assert total(torch.zeros(3, 0)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("n", [1, 3, 255, 256, 257, 4095, 4096, 4097, 20_000])
def test_zeros_behind_a_row_change_nothing(n):
    x = torch.randn(2, n)
    assert torch.equal(total(torch.nn.functional.pad(x, (0, 9000))), total(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("n", [1, 2, 9, 100, 256, 257, 4096, 4097, 70_001, 1_605_632, 17_000_000])
def test_a_gpu_gives_the_same_sums(n):
    x = torch.randn(3, n)
    for some in (x, x.double() / 3, x > 0, (x * 100).long(), x.bfloat16(), x[:1].expand(4, -1)):
        assert torch.equal(total(some.cuda()).cpu(), total(some))
    assert torch.equal(total(x.cuda().T.contiguous().T).cpu(), total(x))


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=40), st.integers(0, 45))
def test_largest_is_a_stable_sort_by_magnitude(x, k):
    mask = largest_in_rows(torch.tensor([x], dtype=torch.float32), k)[0].numpy()
    order = sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:k]
    want = np.zeros(len(x), dtype=bool)
    want[[i for i in order if x[i] != 0]] = True
    assert (mask == want).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_largest_takes_its_own_k_for_every_row(dtype):
    x = torch.tensor([[5, 4, 3, 2], [5, 4, 3, 2], [1, 1, 1, 1]], dtype=dtype)
    assert largest_in_rows(x, torch.tensor([0, 3, 2])).int().tolist() == [[0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
