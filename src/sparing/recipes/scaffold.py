from typing import Literal

from sparing.core.compose import join_shares_beside, weighed_by, with_rule
from sparing.core.errors import MethodError, unsummable
from sparing.core.method import Method, Recipe, evenly
from sparing.core.registry import recipe
from sparing.core.tree import Layout, Tree, with_extra
from sparing.parts.train import control_variates


@recipe("scaffold", paper="Karimireddy et al. 2019, arXiv:1910.06378")
def scaffold(weights: Literal["uniform", "samples"] = "uniform") -> Recipe:
    """Correct client drift by control variates in every local step; doubles upload and download."""

    def apply(method: Method) -> Method:
        if weights == "samples" and method.summed is not None:
            raise unsummable(
                "scaffold counts the samples of those who arrive; let it weigh clients alike: {scaffold: {weights: "
                "uniform}}"
            )
        method = weighed_by(method, evenly) if weights == "uniform" else method
        if any(phase.correct for phase in method.local.phases):
            raise MethodError("scaffold stands twice in the method; drop one")
        control_variates.refuse_other_optimisers(method.local.phases)
        home = method.share.private | method.share.values
        names = [name for name in method.layout.params if name not in home]
        if not names:
            raise MethodError("scaffold has nothing to correct: every layer stays with the client; drop it")
        local, first = method.local, method.extra

        def extra(model: Tree) -> Tree:
            return first(model) | control_variates.server_control_variates(model, names)

        def init(layout: Layout) -> Tree:
            return local.init(layout) | control_variates.client_control_variates(layout, names)

        method = with_rule(method, control_variates.refuse_unlike_means)
        steps = (*method.blend.steps, control_variates.scale_control_variates_step(names, weights))
        phases = tuple(phase._replace(correct=True) for phase in local.phases)
        return method._replace(
            layout=with_extra(method.layout, names, control_variates.SUFFIX),
            share=join_shares_beside(method.share, control_variates.control_variates_share(names)),
            extra=extra,
            blend=method.blend._replace(steps=steps),
            local=local._replace(
                phases=phases,
                init=init,
                lost=control_variates.take_back_unsent,
                wraps=(*local.wraps, control_variates.correct_by_control_variates()),
            ),
        )

    return apply
