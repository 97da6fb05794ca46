"""Adaptive thresholds (FedSCR): the server gives every client one of its own, from what the client last reported.

    threshold_k = threshold * sigmoid(divergence_k + significance_k + spread)

so between a half of it and all of it. It goes down as a note and is in effect from the client's next round.
"""

import math

import torch
from torch import Tensor

from sparing.core.errors import WireError
from sparing.core.keys import Ctx
from sparing.core.later import doubt
from sparing.core.protocols import Arrival, Blended, Report, Rows, Step
from sparing.core.reduce import total
from sparing.core.tree import Tree

QUIET = 3
"""Rounds before the spread of the losses counts."""


def adaptive(threshold: float) -> Step:
    """`threshold` until a client's first report arrives; who sits out, or whose upload is lost, keeps its own."""

    def init(model: Tree, clients: int) -> Tree:
        device = next(iter(model.values())).device
        return {
            "threshold": torch.full((clients,), threshold, dtype=torch.float32, device=device),
            "spread": torch.zeros(1, dtype=torch.float64, device=device),  # summed over rounds
            "rounds": torch.zeros(1, dtype=torch.int64, device=device),
        }

    def serve(state: Tree, model: Tree, ctx: Ctx, rows: Rows | None) -> tuple[Tree, dict[str, Tensor]]:
        return model, {"threshold": state["threshold"][ctx.ids]}

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        seen, ctx = {name: arrival.notes[name].double() for name in ("divergence", "significance", "loss")}, arrival.ctx

        def judge(values: Tensor) -> None:
            for name, row in zip(seen, values.tolist(), strict=True):
                for who, value in zip(ctx.here[0].tolist(), row, strict=True):
                    if not math.isfinite(value) or (value < 0 and name != "loss"):
                        raise WireError(
                            f"round {ctx.round}: client {who} reported a {name} of {value:g}, from which no threshold "
                            "follows; look at its training"
                        )

        doubt(ctx.doubts, torch.stack(list(seen.values())), judge)
        return seen

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        used = state["threshold"][blended.ids]
        rounds, spread = state["rounds"] + 1, state["spread"] + variance(blended.seen["loss"])
        mean = torch.where(rounds > QUIET, spread / rounds, torch.zeros_like(spread))
        told = threshold * torch.sigmoid(blended.seen["divergence"] + blended.seen["significance"] + mean)
        after = state["threshold"].clone()
        after[blended.ids] = told.float()
        report: Report = {}

        def judge(found: Tensor) -> None:
            ids, used = found
            report["threshold_mean"] = float(total(used[None])) / len(used)
            report.update(threshold_min=float(used.min()), threshold_max=float(used.max()))
            report.update({f"threshold/{int(i)}": x for i, x in zip(ids.tolist(), used.tolist(), strict=True)})

        doubt(ctx.doubts, torch.stack([blended.ids.double(), used.double()]), judge)
        return blended.update, {"threshold": after, "spread": spread, "rounds": rounds}, report

    return Step(apply, init, watch, name="fedscr adaptive", serve=serve, notes={"threshold": 1})


def variance(x: Tensor) -> Tensor:
    """Of the participants, not an estimate for everyone: `[n]` -> `[1]`, zero for one of them."""
    mean = total(x[None]) / len(x)
    return total((x - mean).square()[None]) / len(x)
