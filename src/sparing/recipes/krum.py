from typing import Literal

from sparing.core.compose import collected_by
from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import robust


@recipe("krum", paper="Blanchard et al. 2017, arXiv:1703.02757")
def krum(share: float = 0.2, m: int | Literal["most"] = 1) -> Recipe:
    """Aggregate by Krum: the update closest to its neighbours, or the mean of the m best (multi-Krum); unweighted."""
    rule = robust.krum_rule(share, m)

    def apply(method: Method) -> Method:
        if method.layout.bases:
            raise MethodError(
                "krum compares whole updates, but clients of split-mix may train different bases; take median, "
                "trimmed-mean or geomed, or drop split-mix"
            )
        return collected_by(method, "krum", rule, lenient=True)

    return apply
