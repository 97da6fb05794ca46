from typing import Literal

from sparing.core.compose import beside, weighed_by, with_rule
from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe, evenly
from sparing.core.registry import recipe
from sparing.core.tree import Layout, Tree, with_extra
from sparing.parts import variates


@recipe("scaffold", paper="Karimireddy et al. 2019, arXiv:1910.06378")
def scaffold(weights: Literal["uniform", "samples"] = "uniform") -> Recipe:
    """Correct every local step by control variates, so that clients do not drift apart; twice the bytes, both ways."""

    def apply(method: Method) -> Method:
        method = weighed_by(method, evenly) if weights == "uniform" else method
        if any(phase.correct for phase in method.local.phases):
            raise MethodError("scaffold stands twice in the method; drop one")
        variates.refuse_memory(method.local.phases)
        home = method.share.private | method.share.values
        names = [name for name in method.layout.params if name not in home]
        if not names:
            raise MethodError("scaffold has nothing to correct: every layer stays with the client; drop it")
        local, first = method.local, method.extra

        def extra(model: Tree) -> Tree:
            return first(model) | variates.zeros(model, names)

        def init(layout: Layout) -> Tree:
            return local.init(layout) | variates.memories(layout, names)

        method = with_rule(method, variates.refuse_unlike)
        steps = (*method.blend.steps, variates.part_of_all(names, weights))
        phases = tuple(phase._replace(correct=True) for phase in local.phases)
        return method._replace(
            layout=with_extra(method.layout, names, variates.SUFFIX),
            share=beside(method.share, variates.whole(names)),
            extra=extra,
            blend=method.blend._replace(steps=steps),
            local=local._replace(
                phases=phases, init=init, lost=variates.unsent, wraps=(*local.wraps, variates.corrected())
            ),
        )

    return apply
