from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import quantisers


@recipe("ternary", paper="TernGrad, Wen et al. 2017, arXiv:1705.07878")
def ternary() -> Recipe:
    """Quantise each value to -1, 0 or 1 times its layer's maximum, by unbiased stochastic rounding."""

    def apply(method: Method) -> Method:
        return method._replace(up=(*method.up, quantisers.ternary_codec(method.layout)))

    return apply
