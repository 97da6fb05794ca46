from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import quantisers


@recipe("int8", paper="linear 8-bit quantisation")
def int8(stochastic: bool = False) -> Recipe:
    """Quantise each value to 8 bits, with one scale per layer."""

    def apply(method: Method) -> Method:
        return method._replace(up=(*method.up, quantisers.uniform_codec(method.layout, 8, stochastic)))

    return apply
