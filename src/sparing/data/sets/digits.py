"""Datasets that need no download."""

from functools import cache

import numpy as np
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
    x, y = _read_digits()
    return torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y, dtype=torch.int64)


@cache
def _read_digits() -> tuple[np.ndarray, np.ndarray]:
    """The file once; tensors are new each time, so that nobody can change another's."""
    from sklearn.datasets import load_digits  # takes a second to import, so only here

    x, y = load_digits(return_X_y=True)
    return np.asarray(x), np.asarray(y)


@register_dataset("digits")
def _load_digits() -> Dataset:
    """1,797 handwritten digits, 8x8, inside scikit-learn"""
    return Dataset("digits", *digits_tensors(), classes=10, names={"class": list("0123456789")})
