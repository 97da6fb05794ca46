"""The weight that voted on each coordinate of a tensor: a number while all voters share one mask, a tensor once not."""

import torch
from torch import Tensor

from sparing.core.operation import operation
from sparing.core.tree import Tree


class Votes:
    """Exact, because shares lie on a grid: any order and grouping gives the same votes."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None  # the one mask [1, *shape] every voter had; None: everywhere
        self.total: Tensor | None = None  # the weight behind it; None: nobody voted yet
        self.dense: Tensor | None = None  # [1, *shape] float64, once masks differ

    def add(self, scope: Tensor | None, share_K: Tensor, total: Tensor) -> None:
        """K voters with their scope, `[K or 1, *shape]` or None for everywhere, and the sum of their shares."""
        if scope is None or scope.shape[0] == 1:
            self.join(scope, total)
        elif bool((scope == scope[:1]).all()):
            self.join(scope[:1], total)
        else:
            add_votes(self.spread(scope), scope, share_K)

    def join(self, mask: Tensor | None, total: Tensor) -> None:
        if self.dense is None and (self.total is None or same_mask(self.mask, mask)):
            self.mask, self.total = mask, total if self.total is None else self.total + total
            return
        like = mask if mask is not None else self.mask if self.mask is not None else self.dense
        assert like is not None
        self.dense = self.spread(like) + (total if mask is None else mask * total)

    def spread(self, like: Tensor) -> Tensor:
        """Turn the number into a tensor, because masks differ from now on."""
        if self.dense is None:
            self.dense = torch.zeros(1, *like.shape[1:], dtype=torch.float64, device=like.device)
            if self.total is not None:
                self.dense = self.dense + (self.total if self.mask is None else self.mask * self.total)
        return self.dense

    def merge(self, other: "Votes") -> "Votes":
        if other.dense is not None:
            self.dense = self.spread(other.dense) + other.dense
        elif other.total is not None:
            self.join(other.mask, other.total)
        return self


@operation
def add_votes(dense: Tensor, scope: Tensor, share_K: Tensor) -> None:
    """Every client's share, wherever it has a vote."""
    for k, share in enumerate(share_K):
        dense.add_(scope[k : k + 1] * share)


@operation
def divide_by_votes(sums: Tree, votes: dict[str, Votes]) -> tuple[Tree, dict[str, Tensor | None]]:
    """Means from sums, which are used up; and where somebody voted, None meaning everywhere."""
    covered: dict[str, Tensor | None] = {}
    for name, x in sums.items():
        weight, covered[name] = _divisor_of(votes[name], x)
        x.div_(weight)
    return sums, covered


def _divisor_of(votes: Votes, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """What to divide by, and where that is more than nothing."""
    if votes.dense is None:
        assert votes.total is not None
        if bool(votes.total > 0):
            return votes.total.to(like.device), votes.mask  # beyond the mask the sum is zero
    dense = votes.dense if votes.dense is not None else votes.spread(like)
    return dense.masked_fill(dense == 0, 1.0), (dense > 0).expand(like.shape)


def same_mask(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and torch.equal(a, b))
