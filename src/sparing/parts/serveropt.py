"""Server optimisers: transforms of the averaged update. They touch only coordinates covered this round."""

import torch
from torch import Tensor

from sparing.core.errors import check_range
from sparing.core.keys import Ctx
from sparing.core.protocols import Blended, Report, Step
from sparing.core.tree import Layout, Tree


def momentum(layout: Layout, beta: float = 0.9, lr: float = 1.0) -> Step:
    """FedAvgM: v <- beta v + x, the model moves by lr v. Buffers move by x itself."""
    check_range("fedavgm.beta", beta, 0, 1)
    check_range("fedavgm.lr", lr, 0, float("inf"), open_low=True)
    params = frozenset(layout.params)

    def init(model: Tree, clients: int) -> Tree:
        return {name: torch.zeros_like(model[name], dtype=torch.float64) for name in layout.params}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        update, state = dict(blended.update), dict(state)
        for name in params & update.keys():
            moved = beta * state[name] + update[name]
            state[name] = where(blended.covered[name], moved, state[name])
            update[name] = where(blended.covered[name], lr * moved, torch.zeros_like(moved))
        return update, state, {}

    return Step(apply, init, name="fedavgm")


def where(mask: Tensor | None, yes: Tensor, no: Tensor) -> Tensor:
    return yes if mask is None else torch.where(mask, yes, no)
