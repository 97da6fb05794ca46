from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import sparsifiers


@recipe("randk", paper="Stich et al. 2018, arXiv:1809.07599")
def randk(ratio: float = 0.1, unbiased: bool = False, memory: bool = False, shared: bool = False) -> Recipe:
    """Send a random subset of each update; both ends draw its positions from a seed, so they cost no bytes.

    `shared`: the same positions for all clients of a round, so that they add up under masks.
    """

    def apply(method: Method) -> Method:
        up = (*method.up, sparsifiers.randk_codec(method.layout, ratio, unbiased, shared))
        return method._replace(up=up, memory=method.memory or memory)

    return apply
