"""The weight that voted on each coordinate of a tensor: a number while all voters share one mask, a tensor once not."""

from functools import lru_cache

import torch
from torch import Tensor


class Cover:
    """Exact, because shares lie on a grid: any order and grouping gives the same votes."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None  # the one mask [1, *shape] every voter had; None: everywhere
        self.total: Tensor | None = None  # the weight behind it; None: nobody voted yet
        self.dense: Tensor | None = None  # [1, *shape] float64, once masks differ
        self.positive = False  # somebody's weight is known to be

    def add(self, scope: Tensor | None, share_K: Tensor, total: Tensor, positive: bool) -> None:
        """K voters with their scope, `[K or 1, *shape]` or None for everywhere, and the sum of their shares.

        `positive`: that is known to be above zero.
        """
        self.positive |= positive
        if scope is None or scope.shape[0] == 1:
            return self.join(scope, total)
        if bool((scope == scope[:1]).all()):
            return self.join(scope[:1], total)
        dense = self.spread(scope)
        if scope.is_cuda:
            votes = share_K.to(dense, non_blocking=True) @ scope.flatten(1).double()
            dense.add_(votes.reshape(dense.shape))
            return None
        for k, share in enumerate(share_K.tolist()):
            dense.add_(scope[k : k + 1], alpha=share)
        return None

    def join(self, mask: Tensor | None, total: Tensor) -> None:
        if self.dense is None and (self.total is None or same(self.mask, mask)):
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

    def merge(self, other: "Cover") -> "Cover":
        self.positive |= other.positive
        if other.dense is not None:
            self.dense = self.spread(other.dense) + other.dense
        elif other.total is not None:
            self.join(other.mask, other.total)
        return self

    def votes(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight per coordinate, broadcastable to what was voted on, and where it is positive (None: everywhere)."""
        total = self.total if self.dense is None else None
        if total is not None and (self.positive or (not total.is_cuda and bool(total > 0))):
            return total, None if self.mask is None else self.mask.to(like.device)  # elsewhere the sum is zero
        votes = self.dense
        if votes is None:
            assert self.total is not None
            if self.mask is None:
                weight, some = divisor(self.total.to(like.device, non_blocking=True))
                return weight, some.expand(like.shape)
            votes = self.mask * self.total
        votes = votes.to(like.device, non_blocking=True)
        return votes.expand(like.shape), (votes > 0).expand(like.shape)


@lru_cache(maxsize=4)
def divisor(total: Tensor) -> tuple[Tensor, Tensor]:
    """What to divide by, 1 where nobody counts anything, and whether somebody does; once for all tensors."""
    return total.masked_fill(total == 0, 1.0), total > 0


def same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a is b or (a.shape == b.shape and torch.equal(a, b))
