"""How far apart the participants start: the mean over parameters of the variance between clients.

Where clients keep their own copy of what is shared only in part, this is what partial sharing costs; after a full
sync it is zero. Only a simulation can see it.
"""

import torch
from torch import Tensor

from sparing.core.gpu import ready
from sparing.core.keys import Ctx
from sparing.core.later import Doubts, doubt
from sparing.core.protocols import Method, Report, Train
from sparing.core.tree import Trained, Tree, flat


class Stale:
    """Collects, from the start of every client's training, the sums that a variance needs."""

    def __init__(self, method: Method, model: Tree):
        apart = method.share.own - method.share.private - method.share.values
        self.names = [name for name in method.layout.params if name in apart] if method.fit is None else []
        self.model, self.count = model, 0
        self.sums: Tensor | None = None  # over clients, of what they are away from the model and of its square: [2, n]

    def watching(self, train: Train) -> Train:
        """The same training, looked at from the side."""
        if not self.names:
            return train

        def watched(start: Tree, memory: Tree, ctx: Ctx) -> tuple[Trained, Tree, dict[str, Tensor]]:
            self.add(start, len(ctx.ids))
            return train(start, memory, ctx)

        return watched

    def add(self, start: Tree, k: int) -> None:
        self.take(k, spreads([(start[name], self.model[name]) for name in self.names], k))

    def merge(self, other: "Stale") -> None:
        if other.sums is not None:
            self.take(other.count, other.sums)

    def take(self, count: int, sums: Tensor) -> None:
        self.count += count
        self.sums = sums if self.sums is None else self.sums + sums

    def report(self, doubts: Doubts | None = None) -> Report:
        """Complete once the doubts are judged."""
        report: Report = {}
        if self.sums is not None and self.count > 1:
            total, square = self.sums / self.count
            spread = (square - total.square()).clamp(min=0).sum()
            doubt(doubts, spread, lambda x: report.update(stale_divergence=float(x) / len(total)))
        return report


def spreads(pairs: list[tuple[Tensor, Tensor]], k: int) -> Tensor:
    """Of tensors of k clients and the model's: the sums of differences and of their squares, float64 `[2, n]`."""
    if all(ready(x) and x.dtype == origin.dtype == torch.float32 for x, origin in pairs):
        from sparing.core.gpu.spread import spreads as together

        return together(pairs, k)
    parts = []
    for x, origin in pairs:
        away = flat(x.double() - origin).expand(k, -1)
        parts.append(torch.stack([away.sum(0), away.square().sum(0)]))
    return torch.cat(parts, dim=1)
