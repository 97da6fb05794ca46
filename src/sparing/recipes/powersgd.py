from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import powersgd as parts


@recipe("powersgd", paper="Vogels et al. 2019, arXiv:1905.13727")
def powersgd(rank: int = 2, memory: bool = True) -> Recipe:
    """Send each matrix as two low-rank factors, warm-started from the client's previous round."""

    def apply(method: Method) -> Method:
        codec = parts.powersgd_codec(method.layout, rank, method.share.private)
        return method._replace(up=(*method.up, codec), memory=method.memory or memory)

    return apply
