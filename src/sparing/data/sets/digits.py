"""Datasets that need no download."""

import torch
from torch import Tensor

from sparing.data.dataset import Dataset
from sparing.data.registry import register_dataset


def digits_tensors() -> tuple[Tensor, Tensor]:
    """The 1,797 handwritten digits that come with scikit-learn: x `[1797, 1, 8, 8]` in [0, 1], y `[1797]`.

    >>> x, y = digits_tensors()
    >>> x.shape, y.unique().tolist()
    (torch.Size([1797, 1, 8, 8]), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    from sklearn.datasets import load_digits  # takes a second to import, so only here

    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y, dtype=torch.int64)


@register_dataset("digits")
def _load_digits() -> Dataset:
    """1,797 handwritten digits, 8x8, inside scikit-learn"""
    return Dataset("digits", *digits_tensors(), classes=10, names={"class": list("0123456789")})
