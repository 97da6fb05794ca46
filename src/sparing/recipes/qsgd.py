from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import quantisers


@recipe("qsgd", paper="Alistarh et al. 2017, arXiv:1610.02132")
def qsgd(levels: int = 127, bucket: int | None = None) -> Recipe:
    """Quantise each value to levels of its layer's norm, by unbiased stochastic rounding."""

    def apply(method: Method) -> Method:
        return method._replace(up=(*method.up, quantisers.qsgd_codec(method.layout, levels, bucket)))

    return apply
