from sparing.core.compose import narrow_share
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.share import personal as parts


@recipe("personal", paper="Arivazhagan et al. 2019, arXiv:1912.00818")
def personal(layers: list[str] | None = None, shared: list[str] | None = None) -> Recipe:
    """Keep some layers (by default the last) on the client; they are never sent."""

    def apply(method: Method) -> Method:
        return method._replace(share=narrow_share(method.share, parts.personal_share(method.layout, layers, shared)))

    return apply
