"""Who arrived in a round: with which weight, and the scalars watched on the way."""

import torch
from torch import Tensor

from sparing.core.errors import TrainingError
from sparing.core.gpu import carried
from sparing.core.keys import Ctx
from sparing.core.later import Doubts, doubt
from sparing.core.protocols import Arrival
from sparing.core.reach import Grid
from sparing.core.tree import flat, take


class Roll:
    """Clients as they come; reduced in id order at the end."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.parts: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []  # ids and shares [K], scalars [K, ...]
        self.refused = 0  # arrivals that a lenient blend left out

    def add(self, ctx: Ctx, share_K: Tensor, seen: dict[str, Tensor]) -> None:
        ids = ctx.here[0].tolist()
        self.refuse_twice(ids)
        self.ids += ids
        self.parts.append((ctx.ids, share_K, seen))

    def merge(self, other: "Roll") -> None:
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

    def in_order(self, device: torch.device, doubts: Doubts | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(ids, weights, scalars), all in id order."""
        if not self.ids:
            raise TrainingError("no client arrived in this round; raise `sample` or check who is available")
        order = sorted(range(len(self.ids)), key=self.ids.__getitem__)
        here = None if order == list(range(len(order))) else torch.tensor(order)
        there = here if here is None else carried(here, device)

        def whole(parts: list[Tensor]) -> Tensor:
            x = parts[0] if len(parts) == 1 else torch.cat(parts)
            return x if here is None else x[there if x.is_cuda else here]

        ids = whole([ids.to(device) for ids, *_ in self.parts])
        weight = whole([share_K.to(device) for _, share_K, _ in self.parts])
        doubt(doubts, weight, refuse_heavy)
        seen = {name: whole([scalars[name] for *_, scalars in self.parts]) for name in self.parts[0][2]}
        return ids, weight, seen


def refuse_heavy(weight: Tensor) -> None:
    if float(weight.sum()) > 2:
        raise TrainingError("the weights of this round add up to more than `Blend.most` said; scale them down")


def sound(arrival: Arrival, grid: Grid, roll: Roll) -> Arrival:
    """Without the clients that sent something not finite or beyond the grid; they are counted."""
    fine_K = torch.ones_like(arrival.ctx.ids, dtype=torch.bool)
    for name, x in arrival.update.items():
        if x.numel():
            low, high = torch.aminmax(flat(x), dim=1)
            fine_K &= (low >= -grid.limit[name]) & (high <= grid.limit[name])
    for x in arrival.notes.values():
        fine_K &= flat(x).isfinite().all(dim=1)
    if bool(fine_K.all()):
        return arrival
    roll.refused += int((~fine_K).sum())
    index = fine_K.nonzero()[:, 0]
    scope = {name: m if m is None or m.shape[0] == 1 else m[index] for name, m in arrival.scope.items()}
    update, notes = take(arrival.update, index), take(arrival.notes, index)
    return Arrival(update, scope, notes, arrival.model, arrival.ctx.at(index))
