from sparing.core.compose import collected_by
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import robust


@recipe("median", paper="Yin et al. 2018, arXiv:1803.01498")
def median() -> Recipe:
    """Aggregate by the coordinate-wise median instead of the mean; unweighted."""

    def apply(method: Method) -> Method:
        return collected_by(method, "median", robust.coordinate_median, lenient=True)

    return apply
