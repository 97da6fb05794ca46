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
    return float(micro_aucs(scores, y, torch.zeros_like(y), 1))


def micro_aucs(scores: Tensor, y: Tensor, owner: Tensor, k: int) -> Tensor:
    """The same for k clients at once, float64 `[k]`; `owner` `[n]` says whose a sample is, and does not fall.

    All ranks are halves of whole numbers and their sums exact, so nothing depends on their order.
    """
    if scores.dim() != 2 or scores.shape[1] < 2:
        return torch.full((k,), math.nan, dtype=torch.float64, device=scores.device)
    flat, classes = scores.flatten(), scores.shape[1]
    who = owner[:, None].expand_as(scores).flatten()
    order = flat.argsort(stable=True)
    if k > 1:
        order = order[who[order].argsort(stable=True)]
    size, whose = flat[order], who[order]
    fresh = (size[1:] != size[:-1]) | (whose[1:] != whose[:-1])
    group = torch.cat([fresh.new_zeros(min(len(flat), 1)), fresh]).cumsum(0)
    ties = torch.zeros_like(flat, dtype=torch.float64)
    ties.scatter_add_(0, group, torch.ones_like(ties))
    rank = torch.empty_like(ties)
    rank[order] = (ties.cumsum(0) - (ties - 1) / 2)[group]  # the mean rank of equal scores
    count = torch.zeros(k, dtype=torch.float64, device=flat.device)
    count.index_add_(0, owner, torch.ones_like(owner, dtype=torch.float64))
    below = torch.zeros_like(count).index_add_(0, owner, rank.view_as(scores).gather(1, y[:, None])[:, 0])
    below = below - count * classes * (count.cumsum(0) - count) - count * (count + 1) / 2
    return below / (count * count * (classes - 1))


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


def weighted_mean(x: Tensor, weight: Tensor | None = None) -> float:
    """Per client, or weighted by samples; NaN over nobody."""
    if not len(x):
        return math.nan
    w = torch.ones(len(x), dtype=torch.float64) if weight is None else weight.double()
    return float((x.double() * w).sum() / w.sum())
