from sparing.core.compose import narrow
from sparing.core.protocols import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.layers import personal as keep_home


@recipe("personal", paper="Arivazhagan et al. 2019, arXiv:1912.00818")
def personal(layers: list[str] | None = None) -> Recipe:
    """Keep some layers (by default the last) on the client; they never cross the wire."""

    def apply(method: Method) -> Method:
        return method._replace(share=narrow(method.share, keep_home(method.layout, layers)))

    return apply
