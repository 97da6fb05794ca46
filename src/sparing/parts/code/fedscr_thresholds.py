"""Adaptive thresholds (FedSCR): the server gives every client one of its own, from what the client last reported.

    threshold_k = threshold * sigmoid(divergence_k + significance_k + spread)

so between a half of it and all of it. It goes down as a note and is in effect from the client's next round.
"""

import math

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import WireError
from sparing.core.method import Arrival, Blended, Report, Rows, Serving, Step, Summary
from sparing.core.reduce import total
from sparing.core.tree import Tree

QUIET = 3
"""Rounds before the spread of the losses counts."""


def adaptive_threshold_step(threshold: float) -> Step:
    """`threshold` until a client's first report arrives; who sits out, or whose upload is lost, keeps its own."""

    def init(model: Tree, clients: int) -> Tree:
        device = next(iter(model.values())).device
        return {
            "threshold": torch.full((clients,), threshold, dtype=torch.float32, device=device),
            "spread": torch.zeros(1, dtype=torch.float64, device=device),  # summed over rounds
            "rounds": torch.zeros(1, dtype=torch.int64, device=device),
        }

    def serve(state: Tree, model: Tree, ctx: Ctx, rows: Rows | None) -> tuple[Tree, dict[str, Tensor]]:
        return model, {"threshold": state["threshold"][ctx.placed(ctx.ids)]}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        who = ctx.placed(blended.ids)
        used = state["threshold"][who]
        rounds, spread = state["rounds"] + 1, state["spread"] + _cohort_variance(blended.seen["loss"])
        mean = torch.where(rounds > QUIET, spread / rounds, torch.zeros_like(spread))
        told = threshold * torch.sigmoid(blended.seen["divergence"] + blended.seen["significance"] + mean)
        after = state["threshold"].clone()
        after[who] = told.float()
        ids = blended.ids.tolist()

        def numbers(used: Tensor) -> dict[str, float]:
            mean = float(total(used.double()[None])) / len(used)
            found = {"threshold_mean": mean, "threshold_min": float(used.min()), "threshold_max": float(used.max())}
            return found | {f"threshold/{i}": x for i, x in zip(ids, used.tolist(), strict=True)}

        return blended.update, {"threshold": after, "spread": spread, "rounds": rounds}, Summary([used], numbers)

    return Step(apply, init, _watch_reports, name="fedscr adaptive", serving=Serving(serve, notes={"threshold": 1}))


def _watch_reports(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
    """What clients report of themselves; numbers from which no threshold follows are refused."""
    seen, ctx = {name: arrival.notes[name].double() for name in ("divergence", "significance", "loss")}, arrival.ctx
    values = torch.stack(list(seen.values()))
    fine = torch.cat([(values[:2] >= 0) & (values[:2] < math.inf), values[2:].isfinite()])

    def no_threshold() -> WireError:
        i, k = (~fine).nonzero()[0].tolist()
        return WireError(
            f"round {ctx.round}: client {int(ctx.ids[k])} reported a {list(seen)[i]} of {float(values[i, k]):g}, from "
            "which no threshold follows; look at its training"
        )

    ctx.require(fine, no_threshold)
    return seen


def _cohort_variance(x: Tensor) -> Tensor:
    """Of the participants, not an estimate for everyone: `[n]` -> `[1]`, zero for one of them."""
    mean = total(x[None]) / len(x)
    return total((x - mean).square()[None]) / len(x)
