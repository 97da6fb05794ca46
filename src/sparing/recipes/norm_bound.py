from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import norm_bound as parts


@recipe("norm-bound", paper="Sun et al. 2019, arXiv:1911.07963")
def norm_bound(bound: float) -> Recipe:
    """Clip every update to a norm of at most `bound` before averaging."""
    step = parts.norm_bound_step(bound)

    def apply(method: Method) -> Method:
        return method._replace(blend=method.blend._replace(steps=(step, *method.blend.steps), lenient=True))

    return apply
