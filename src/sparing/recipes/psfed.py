from sparing.core.compose import narrow
from sparing.core.protocols import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts import masks


@recipe("psfed", paper="partial model sharing")
def psfed(fraction: float = 0.5, per_client: bool = False, first: str = "download") -> Recipe:
    """Share a fresh random part of the parameters each round; the rest stays the client's own."""

    def apply(method: Method) -> Method:
        share = masks.random(method.layout, fraction, per_client, first)
        return method._replace(share=narrow(method.share, share))

    return apply
