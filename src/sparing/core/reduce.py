"""Row-exact reductions: row k of a K-call has the bits of that row alone, on any device and any number of threads.

Library sums split long rows between threads and pick their order by shape, so their last bits wander. Here a sum is
a fixed pairwise tree of elementwise float64 additions, which every device rounds alike.

    >>> total(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([6.], dtype=torch.float64)
"""

import torch
from torch import Tensor

LONG = 1 << 18
"""Rows of so many numbers are worth a sample before the search for the largest ones."""
SAMPLE = 1 << 14


def total(x: Tensor) -> Tensor:
    """Sum over all but the first axis: `[K, ...]` -> `[K]` float64."""
    x = x.reshape(x.shape[0], -1).double()
    if x.shape[1] == 0:
        return x.new_zeros(x.shape[0])
    while (n := x.shape[1]) > 1:
        half = n // 2
        folded = x[:, :half] + x[:, half : 2 * half]
        if n % 2:
            folded[:, :1] += x[:, n - 1 :]
        x = folded
    return x[:, 0]


def largest(x: Tensor, k: int | Tensor) -> Tensor:
    """The k largest magnitudes of every row, ties to the lowest index, zeros never: `[K, n]` -> bool `[K, n]`.

    k is one number or one per row, `[K]`.

    >>> largest(torch.tensor([[1.0, -3.0, 3.0, 0.0]]), 2)
    tensor([[False,  True,  True, False]])
    """
    k_K = torch.as_tensor(k, device=x.device).expand(x.shape[0]).clamp(0, x.shape[1])[:, None]
    most = int(k_K.max()) if k_K.numel() else 0
    if most == 0:
        return torch.zeros_like(x, dtype=torch.bool)
    size = x.abs()
    if size.device.type == "cpu" and size.shape[1] >= LONG:
        cut = torch.stack([kth(row, k) for row, k in zip(size, k_K[:, 0].tolist(), strict=True)])[:, None]
    else:
        cut = size.topk(most, dim=1).values.gather(1, (k_K - 1).clamp(min=0))
    chosen = ~(size < cut)  # so that NaN is among them, and whoever receives it can refuse it
    spare = chosen.sum(dim=1, keepdim=True) - k_K
    if bool((spare > 0).any()):
        tied = size == cut
        chosen &= ~tied | (tied.cumsum(dim=1) <= tied.sum(dim=1, keepdim=True) - spare)
    return chosen if bool((cut > 0).all()) else chosen & (size != 0)


def kth(row: Tensor, k: int) -> Tensor:
    """The k-th largest number of a row, NaN above all, looked for among the few above a bound that a sample suggests.

    >>> kth(torch.tensor([4.0, 1.0, 3.0]), 2)
    tensor(3.)
    """
    sample = row[:: max(1, len(row) // SAMPLE)]
    hoped = int(1.3 * k * len(sample) / max(len(row), 1)) + 30
    if hoped < len(sample):
        few = row[~(row < sample.topk(hoped).values[-1])]
        row = few if len(few) >= k else row
    return row.topk(max(k, 1)).values[-1]
