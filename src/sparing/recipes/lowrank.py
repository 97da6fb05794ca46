from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import lowrank as components


@recipe("lowrank", paper="ours; after Vogels et al. 2019, arXiv:1905.13727")
def lowrank(energy: float = 0.9, rank: int = 32, memory: bool = True) -> Recipe:
    """Send a quantised low-rank approximation of each matrix, stronger components more finely; quantise vectors."""

    def apply(method: Method) -> Method:
        codec = components.components_codec(method.layout, energy, rank, method.share.private)
        return method._replace(up=(*method.up, codec), memory=method.memory or memory)

    return apply
