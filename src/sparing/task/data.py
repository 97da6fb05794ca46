"""Datasets that need no download."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor


def digits() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits that come with scikit-learn: x `[1797, 1, 8, 8]` in [0, 1], y `[1797]`.

    >>> x, y = digits()
    >>> x.shape, y.unique().tolist()
    (torch.Size([1797, 1, 8, 8]), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y, dtype=torch.int64)
