from sparing.core.compose import collected_by
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import robust


@recipe("geomed", paper="Pillutla et al. 2019, arXiv:1912.13445")
def geomed(nu: float = 1e-6, steps: int = 4) -> Recipe:
    """Aggregate by the geometric median (RFA): the point of least weighted distance to all updates."""
    rule = robust.geometric_median_rule(nu, steps)

    def apply(method: Method) -> Method:
        return collected_by(method, "geomed", rule, lenient=True)

    return apply
