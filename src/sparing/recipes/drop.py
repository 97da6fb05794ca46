from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import sparsifiers


@recipe("drop", paper="gradient dropping, Aji and Heafield 2017, arXiv:1704.05021")
def drop(ratio: float = 0.01, over: str = "layer") -> Recipe:
    """Gradient dropping: send entries above a magnitude quantile of the layer or model, with error feedback."""

    def apply(method: Method) -> Method:
        return method._replace(
            up=(*method.up, sparsifiers.topk_codec(method.layout, ratio, "quantile", over)), memory=True
        )

    return apply
