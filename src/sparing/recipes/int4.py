from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import quantisers


@recipe("int4", paper="linear 4-bit quantisation")
def int4(stochastic: bool = False) -> Recipe:
    """Quantise each value to 4 bits, with one scale per layer."""

    def apply(method: Method) -> Method:
        return method._replace(up=(*method.up, quantisers.uniform_codec(method.layout, 4, stochastic)))

    return apply
