from sparing.core.compose import collected_by
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import robust


@recipe("trimmed-mean", paper="Yin et al. 2018, arXiv:1803.01498")
def trimmed_mean(share: float = 0.2) -> Recipe:
    """Aggregate by the coordinate-wise trimmed mean, without a share of the values at each end; unweighted."""
    rule = robust.trimmed_mean_rule(share)

    def apply(method: Method) -> Method:
        return collected_by(method, "trimmed-mean", rule, lenient=True)

    return apply
