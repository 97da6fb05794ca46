from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import ecsq as parts


@recipe("ecsq", paper="Sullivan 1996, doi:10.1109/18.532878")
def ecsq(step: float = 1.0, over: str = "model", memory: bool = False) -> Recipe:
    """Entropy-coded scalar quantisation: round values to multiples of one step, then entropy-code them."""

    def apply(method: Method) -> Method:
        return method._replace(
            up=(*method.up, parts.ecsq_codec(method.layout, step, over)), memory=method.memory or memory
        )

    return apply
