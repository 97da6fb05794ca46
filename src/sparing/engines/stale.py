"""How far apart the participants start: the mean over parameters of the variance between clients.

Where clients keep their own copy of what is shared only in part, this is what partial sharing costs; after a full
sync it is zero. Only a simulation can see it.
"""

from torch import Tensor

from sparing.core.keys import Ctx
from sparing.core.protocols import Method, Train
from sparing.core.tree import Trained, Tree


class Stale:
    """Collects, from the start of every client's training, the sums that a variance needs."""

    def __init__(self, method: Method, model: Tree):
        apart = method.share.own - method.share.private - method.share.values
        self.names = [name for name in method.layout.params if name in apart] if method.fit is None else []
        self.model, self.count = model, 0
        self.sum: Tree = {}
        self.square: dict[str, Tensor] = {}

    def watching(self, train: Train) -> Train:
        """The same training, looked at from the side."""
        if not self.names:
            return train

        def watched(start: Tree, memory: Tree, ctx: Ctx) -> tuple[Trained, Tree, dict[str, Tensor]]:
            self.add(start, len(ctx.ids))
            return train(start, memory, ctx)

        return watched

    def add(self, start: Tree, k: int) -> None:
        self.count += k
        for name in self.names:
            away = (start[name].double() - self.model[name]).expand(k, *self.model[name].shape[1:])
            self.sum[name] = self.sum.get(name, 0) + away.sum(0)
            self.square[name] = self.square.get(name, 0) + away.square().sum(0)

    def merge(self, other: "Stale") -> None:
        self.count += other.count
        for name in other.sum:
            self.sum[name] = self.sum.get(name, 0) + other.sum[name]
            self.square[name] = self.square.get(name, 0) + other.square[name]

    def report(self) -> dict[str, float]:
        if not self.names or self.count < 2:
            return {}
        n = self.count
        spread = sum(float((self.square[x] / n - (self.sum[x] / n).square()).clamp(min=0).sum()) for x in self.names)
        return {"stale_divergence": spread / sum(self.sum[x].numel() for x in self.names)}
