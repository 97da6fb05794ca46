"""How far apart the participants start: the mean over parameters of the variance between clients.

Where clients keep their own copy of what is shared only in part, this is what partial sharing costs; after a full
sync it is zero. Only a simulation can see it.
"""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.method import Lesson, Method, Phase, Report, Train, Trained, Wrap
from sparing.core.operation import operation
from sparing.core.tree import Tree, flat


class Divergence:
    """Collects, from the start of every client's training, the sums that a variance needs."""

    def __init__(self, method: Method, model: Tree):
        apart = method.share.own - method.share.private - method.share.values
        self.names = [name for name in method.layout.params if name in apart] if method.fit is None else []
        self.model, self.count = model, 0
        self.sums: Tensor | None = None  # over clients, of what they are away from the model and of its square: [2, n]

    def watching(self, method: Method) -> Method:
        """The same method, looked at from the side."""
        if not self.names:
            return method

        def around(train: Train, phases: tuple[Phase, ...]) -> Train:
            def watched(lesson: Lesson, ctx: Ctx) -> Trained:
                self.add(lesson.start, len(ctx.ids))
                return train(lesson, ctx)

            return watched

        local = method.local
        return method._replace(local=local._replace(wraps=(*local.wraps, Wrap(around))))

    def add(self, start: Tree, k: int) -> None:
        self.take(k, difference_sums([(start[name], self.model[name]) for name in self.names], k))

    def merge(self, other: "Divergence") -> None:
        if other.sums is not None:
            self.take(other.count, other.sums)

    def take(self, count: int, sums: Tensor) -> None:
        self.count += count
        self.sums = sums if self.sums is None else self.sums + sums

    def report(self) -> Report:
        if self.sums is None or self.count < 2:
            return {}
        total, square = self.sums / self.count
        return {"stale_divergence": (square - total.square()).clamp(min=0).sum() / len(total)}


@operation
def difference_sums(pairs: list[tuple[Tensor, Tensor]], k: int) -> Tensor:
    """Of tensors of k clients and the model's: the sums of differences and of their squares, float64 `[2, n]`.

    One client is added after the other; on a GPU, to rounding.
    """
    parts = []
    for x, origin in pairs:
        sums = torch.zeros(2, origin.numel(), dtype=torch.float64, device=x.device)
        for away in flat(x.double() - origin).expand(k, -1):
            sums += torch.stack([away, away.square()])
        parts.append(sums)
    return torch.cat(parts, dim=1)
