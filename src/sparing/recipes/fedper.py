from sparing.core.method import Recipe
from sparing.core.registry import recipe
from sparing.recipes.personal import personal


@recipe("fedper", paper="Arivazhagan et al. 2019, arXiv:1912.00818")
def fedper(layers: list[str] | None = None, shared: list[str] | None = None) -> Recipe:
    """Keep the head (by default the last layer) on the client, trained with the shared body; same as `personal`."""
    return personal(layers, shared)
