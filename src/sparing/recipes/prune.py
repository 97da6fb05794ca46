from sparing.core.compose import narrow_share
from sparing.core.errors import MethodError
from sparing.core.method import Method, Phase, Recipe
from sparing.core.registry import recipe
from sparing.core.tree import Tree
from sparing.parts.share import prune as parts


@recipe("prune", paper="magnitude pruning, Han et al. 2015, arXiv:1506.02626, before the first round")
def prune(keep: float = 0.5, over: str = "layer") -> Recipe:
    """Prune the smallest weights of the initial model for good: they are neither trained nor sent."""

    def apply(method: Method) -> Method:
        if method.fit is not None:
            raise MethodError("prune cannot go with models of several sizes: resizing fills pruned weights; drop one")
        part, before = parts.prune_by_magnitude(method.layout, keep, over), method.extra

        def held(phase: Phase) -> Phase:
            return phase._replace(holds=phase.holds | part.names)

        local = method.local.each_phase(held)

        def extra(model: Tree) -> Tree:
            first = part.first(model)
            return before(model | first) | first

        return method._replace(share=narrow_share(method.share, part.share), local=local, extra=extra)

    return apply
