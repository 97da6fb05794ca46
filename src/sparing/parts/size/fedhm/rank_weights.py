"""How much clients of different rank count (FedHM), and the old model's vote when nobody came with the largest."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import check_range
from sparing.core.method import Arrival, Blended, Report, Step, Weigh
from sparing.core.reduce import total
from sparing.core.tree import Tree

Sizes = Callable[[Ctx], Tensor]
LOGITS: dict[str, Callable[[float], float]] = {"ratio": lambda ratio: ratio, "factor": lambda ratio: -1 / ratio}
"""What the softmax over clients is taken of; weightings that do not look at ranks have none."""


def _weights_by_ratio(weighting: str, temperature: float, ratios: Sequence[float], of: Sequence[float]) -> list[float]:
    """What clients of these ratios count, unnormalised, so that the largest of `ratios` counts 1.

    >>> _weights_by_ratio("factor", 1.0, [1, 0.5], of=[1, 0.5])
    [1.0, 0.36787944117144233]
    """
    check_range("fedhm.temperature", temperature, 0, float("inf"), open_low=True)
    logit = LOGITS.get(weighting, lambda ratio: 0.0)
    return [math.exp(min((logit(ratio) - logit(max(ratios))) / temperature, 700.0)) for ratio in of]


def rank_weigh(weighting: str, temperature: float, ratios: Sequence[float], sizes: Sizes) -> Weigh:
    """`ratio`, `factor`: a softmax over the clients that came; `uniform`: all alike."""
    table = _weights_by_ratio(weighting, temperature, ratios, of=ratios)

    def of(state: Tree, arrival: Arrival) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.tensor([table[size] for size in sizes(arrival.ctx).tolist()], dtype=torch.float64), {}

    return Weigh(of, lambda ctx: float(ctx.cohort), name=f"rank ({weighting})", looks=False)


def history_step(weighting: str, temperature: float, ratios: Sequence[float], sizes: Sizes) -> Step:
    """If no client of the largest ratio came, the old model joins as one more client, of ratio 1.

    Updates are differences from the old model, so its vote scales them by W / (W + its weight). Where weights do
    not follow ranks, its own is the mean of the others'.
    """
    table = _weights_by_ratio(weighting, temperature, ratios, of=ratios)
    (old,) = _weights_by_ratio(weighting, temperature, ratios, of=[1.0])

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {"size": sizes(arrival.ctx)}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        came = blended.seen["size"].tolist()
        if any(ratios[size] == max(ratios) for size in came):
            return blended.update, state, {"history": 0.0}
        share = old / (float(total(torch.tensor([[table[size] for size in came]], dtype=torch.float64))) + old)
        return {name: x * (1 - share) for name, x in blended.update.items()}, state, {"history": share}

    return Step(apply, watch=watch, name="history")
