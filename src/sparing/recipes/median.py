from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import robust


@recipe("median", paper="Yin et al. 2018, arXiv:1803.01498")
def median() -> Recipe:
    """Aggregate by the coordinate-wise median instead of the mean; unweighted."""

    def apply(method: Method) -> Method:
        return robust.with_collected_rule(method, "median", robust.coordinate_median)

    return apply
