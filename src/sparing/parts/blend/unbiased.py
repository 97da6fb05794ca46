"""Unbiased aggregation: the cohort's updates weighed by everyone's samples, not only by those of the cohort."""

from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import Arrival, Blended, Method, Report, Step, by_samples
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree


def unbiased_step(layout: Layout) -> Step:
    """Weights (N / n) p_k instead of w_k: N clients, n of them here, p_k their share of everyone's samples.

    Against w_k that is one factor for all, and 1 where all clients have equally many samples. Buffers are values that
    are averaged, so they keep w_k.
    """
    params = frozenset(layout.params)

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {"n": arrival.notes["n"]}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        here = float(total(blended.seen["n"][None]))
        scale = (ctx.clients - ctx.held) * here / (len(blended.ids) * ctx.samples)
        return {name: x * scale if name in params else x for name, x in blended.update.items()}, state, {}

    return Step(apply, watch=watch, name="unbiased", needs_mean=True)


def refuse_weighting(method: Method) -> None:
    if method.blend.weigh.name != by_samples.name:
        raise MethodError(
            f"unbiased aggregation means weights by everyone's samples, but {method.blend.weigh.name!r} weighs "
            "otherwise; set aggregation: normalised, or drop that weighting"
        )
