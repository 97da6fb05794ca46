"""Client models of several sizes, as ratios of the full one: which are offered, and which a client gets."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError, check_range


def refuse_ratios(method: str, ratios: Sequence[float]) -> None:
    if not ratios or len(set(ratios)) < len(ratios):
        raise MethodError(f"{method}.ratios is {list(ratios)}; offer at least one, each once, such as [1, 0.5]")
    for ratio in ratios:
        check_range(f"{method}.ratios", ratio, 0, 1, open_low=True)


def by_capacity(ratios: Sequence[float], what: str) -> Callable[[Ctx], Tensor]:
    """Each client's size: the largest ratio within the `what` it declares, else the smallest; undeclared, by its id."""

    def sizes(ctx: Ctx) -> Tensor:
        declared = (ctx.capacity or {}).get(what)
        if declared is None:
            return ctx.ids % len(ratios)
        offered = torch.tensor(ratios, dtype=torch.float64, device=declared.device)
        within = declared.double()[:, None] >= offered - 1e-6
        return torch.where(within, offered, -offered).argmax(dim=1)

    return sizes
