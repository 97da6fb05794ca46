"""What accuracies say about a federation: how good, how even, how bad at the bottom."""

import math

import torch
from torch import Tensor


def micro_auc(scores: Tensor, y: Tensor) -> float:
    """Area under the ROC curve over all (sample, class) pairs, ties counted half: `[n, classes]`, `[n]` -> float.

    NaN where there is nothing to tell apart.

    >>> micro_auc(torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([0, 1]))
    1.0
    """
    if scores.dim() != 2 or not len(scores) or scores.shape[1] < 2:
        return math.nan
    flat = scores.double().flatten()
    right = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, y[:, None], True).flatten()
    _, place, count = flat.unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[place]  # the mean rank of equal scores
    positive = int(right.sum())
    negative = len(flat) - positive
    return float((rank[right].sum() - positive * (positive + 1) / 2) / (positive * negative))


def worst_decile(accuracy: Tensor) -> float:
    """Mean over the worst tenth of the clients, at least one of them.

    >>> round(worst_decile(torch.arange(20) / 20), 6)
    0.025
    """
    if not len(accuracy):
        return math.nan
    worst = accuracy.double().sort().values[: max(1, math.floor(len(accuracy) / 10 + 0.5))]
    return float(worst.mean())


def jain(accuracy: Tensor) -> float:
    """Jain's index: 1 where all clients fare alike, 1/n where one has everything.

    >>> jain(torch.tensor([1.0, 0.0])), jain(torch.tensor([0.5, 0.5]))
    (0.5, 1.0)
    """
    a = accuracy.double()
    squares = float(a.square().sum()) * len(a)
    return float(a.sum()) ** 2 / squares if squares else math.nan


def mean(x: Tensor, weight: Tensor | None = None) -> float:
    """Per client, or weighted by samples; NaN over nobody."""
    if not len(x):
        return math.nan
    w = torch.ones(len(x), dtype=torch.float64) if weight is None else weight.double()
    return float((x.double() * w).sum() / w.sum())
