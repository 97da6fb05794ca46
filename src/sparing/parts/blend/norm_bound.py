"""Norm bounding: an update longer than the bound is scaled down to it before it is blended."""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import check_range
from sparing.core.method import Arrival, Blended, Report, Step
from sparing.core.reduce import total
from sparing.core.tree import Tree, column


def norm_bound_step(bound: float) -> Step:
    """u <- u min(1, bound / |u|), with |u| over all floating tensors that arrived, buffers too."""
    check_range("norm-bound.bound", bound, 0, float("inf"), open_low=True)

    def receive(state: Tree, arrival: Arrival) -> Arrival:
        square_K = torch.zeros(len(arrival.ctx.ids), dtype=torch.float64, device=arrival.ctx.device)
        for x in arrival.update.values():
            square_K += total(x.double().square()) if x.is_floating_point() else 0
        norm_K = square_K.sqrt()
        factor_K = bound / norm_K.clamp(min=bound)
        update = {
            name: (x.double() * column(factor_K, x)).to(x.dtype) if x.is_floating_point() else x
            for name, x in arrival.update.items()
        }
        return arrival._replace(update=update, notes=arrival.notes | {"norm": norm_K})

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {"norm": arrival.notes["norm"]}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        norm = blended.seen["norm"]
        said = {"bounded": (norm > bound).double().mean(), "norm_median": norm.quantile(0.5)}
        return blended.update, state, said

    return Step(apply, watch=watch, name="norm-bound", receive=receive)
