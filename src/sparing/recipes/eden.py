from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import eden as rotate


@recipe("eden", paper="DRIVE and EDEN, Vargaftik et al. 2021 and 2022, arXiv:2105.08339, arXiv:2108.08842")
def eden(bits: int = 1, unbiased: bool = True) -> Recipe:
    """Apply a random rotation to each layer's update, then quantise every coordinate to a few bits."""

    def apply(method: Method) -> Method:
        return method._replace(up=(*method.up, rotate.eden_codec(method.layout, bits, unbiased)))

    return apply
