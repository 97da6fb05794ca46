"""How much clients of different rank count (FedHM), and the old model's vote when nobody came with the largest."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparing.core.errors import check_range
from sparing.core.keys import Ctx
from sparing.core.protocols import Arrival, Blended, Report, Step, Weigh
from sparing.core.reduce import total
from sparing.core.tree import Tree

Sizes = Callable[[Ctx], Tensor]
LOGITS: dict[str, Callable[[float], float]] = {"ratio": lambda ratio: ratio, "factor": lambda ratio: -1 / ratio}
"""What the softmax over clients is taken of; weightings that do not look at ranks have none."""


def weights(weighting: str, temperature: float, ratios: Sequence[float], of: Sequence[float]) -> list[float]:
    """What clients of these ratios count, unnormalised, so that the largest of `ratios` counts 1.

    >>> weights("factor", 1.0, [1, 0.5], of=[1, 0.5])
    [1.0, 0.36787944117144233]
    """
    check_range("fedhm.temperature", temperature, 0, float("inf"), open_low=True)
    logit = LOGITS.get(weighting, lambda ratio: 0.0)
    return [math.exp(min((logit(ratio) - logit(max(ratios))) / temperature, 700.0)) for ratio in of]


def by_rank(weighting: str, temperature: float, ratios: Sequence[float], sizes: Sizes) -> Weigh:
    """`ratio`, `factor`: a softmax over the clients that came; `uniform`: all alike."""
    table = weights(weighting, temperature, ratios, of=ratios)

    def of(state: Tree, arrival: Arrival) -> tuple[Tensor, dict[str, Tensor]]:
        return at(table, sizes(arrival.ctx)), {}

    return Weigh(of, most=lambda ctx: float(ctx.cohort), name=f"rank ({weighting})")


def history(weighting: str, temperature: float, ratios: Sequence[float], sizes: Sizes) -> Step:
    """If no client of the largest ratio came, the old model joins as one more client, of ratio 1.

    Updates are differences from the old model, so its vote scales them by W / (W + its weight). Where weights do
    not follow ranks, its own is the mean of the others'.
    """
    table = weights(weighting, temperature, ratios, of=ratios)
    (old,) = weights(weighting, temperature, ratios, of=[1.0])

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        size = sizes(arrival.ctx)
        return {"ratio": at(ratios, size), "weight": at(table, size)}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        if bool((blended.seen["ratio"] == max(ratios)).any()):
            return blended.update, state, {"history": 0.0}
        share = old / (float(total(blended.seen["weight"][None])) + old)
        return {name: x * (1 - share) for name, x in blended.update.items()}, state, {"history": share}

    return Step(apply, watch=watch, name="history")


def at(table: Sequence[float], index: Tensor) -> Tensor:
    return torch.tensor(table, dtype=torch.float64, device=index.device)[index]
