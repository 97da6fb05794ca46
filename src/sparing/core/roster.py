"""Who arrived in a round: with which weight, and the scalars watched on the way."""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import TrainingError
from sparing.core.ops import place


class Roster:
    """Clients as they come; read in id order at the end."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.parts: list[tuple[Tensor, dict[str, Tensor]]] = []  # shares [K], scalars [K, ...]
        self.refused = 0  # arrivals that a lenient blend left out

    def add(self, ctx: Ctx, share_K: Tensor, seen: dict[str, Tensor]) -> None:
        self.ids += ctx.ids.tolist()
        self.parts.append((share_K, seen))

    def merge(self, other: "Roster") -> None:
        self.refuse_twice(other.ids)
        self.ids += other.ids
        self.parts += other.parts
        self.refused += other.refused

    def refuse_twice(self, ids: list[int]) -> None:
        known = set(self.ids)
        if len(known.union(ids)) == len(known) + len(ids):
            return
        for i in ids:
            if i in known:
                raise TrainingError(f"client {i} arrived twice in one round; each client counts once")
            known.add(i)

    def in_order(self, ctx: Ctx) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(ids on the host, shares, scalars), all in id order."""
        if not self.ids:
            raise TrainingError("no client arrived in this round; raise `sample` or check who is available")
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
        index = None if order == list(range(len(order))) else torch.tensor(order)

        def whole(parts: list[Tensor]) -> Tensor:
            x = parts[0] if len(parts) == 1 else torch.cat(parts)
            return x if index is None else x[place(index, x.device)]

        share = whole([share_K for share_K, _ in self.parts])
        ctx.require(share.sum() <= 2, _heavier_than_said)
        seen = {name: whole([scalars[name] for _, scalars in self.parts]) for name in self.parts[0][1]}
        return whole([torch.tensor(self.ids)]), share, seen


def _heavier_than_said() -> TrainingError:
    return TrainingError("the weights of this round add up to more than `Weigh.most` said; scale them down")
