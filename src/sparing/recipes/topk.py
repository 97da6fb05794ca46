from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import sparsifiers


@recipe("topk", paper="Aji and Heafield 2017, arXiv:1704.05021")
def topk(ratio: float = 0.1, mode: str = "exact", over: str = "layer", memory: bool = False) -> Recipe:
    """Send only the largest entries of each layer's update; their positions count towards the bytes."""

    def apply(method: Method) -> Method:
        up = (*method.up, sparsifiers.topk_codec(method.layout, ratio, mode, over))
        return method._replace(up=up, memory=method.memory or memory)

    return apply
