from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts import robust


@recipe("median", paper="Yin et al. 2018, arXiv:1803.01498")
def median() -> Recipe:
    """The median of every coordinate instead of the mean; not weighted."""

    def apply(method: Method) -> Method:
        return robust.collecting(method, "median", robust.median)

    return apply
