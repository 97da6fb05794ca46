"""Row-exact reductions: row k of a K-call has the bits of that row alone, on any device and any number of threads.

Library sums split long rows between threads and pick their order by shape, so their last bits wander. Here a sum is
a fixed pairwise tree of elementwise float64 additions, which every device rounds alike.

    >>> total(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([6.], dtype=torch.float64)
"""

import torch
from torch import Tensor


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
    cut = size.topk(most, dim=1).values.gather(1, (k_K - 1).clamp(min=0))
    above = ~(size <= cut)  # so that NaN is among them, and whoever receives it can refuse it
    missing = k_K - above.sum(dim=1, keepdim=True)
    tied = size == cut
    if bool((tied.sum(dim=1, keepdim=True) > missing).any()):
        tied &= tied.cumsum(dim=1) <= missing
    return (above | tied) & (size != 0)
