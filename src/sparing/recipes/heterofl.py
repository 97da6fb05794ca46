from collections.abc import Sequence

from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.size.heterofl import width_slices_fit


@recipe("heterofl", paper="Diao et al. 2021, arXiv:2010.01264")
def heterofl(ratios: Sequence[float] = (1, 0.5, 0.25, 0.125, 0.0625), scaler: bool = True) -> Recipe:
    """Clients train the first units of every hidden layer, as many as fit their resources."""
    ratios = tuple(ratios)

    def apply(method: Method) -> Method:
        if method.size is not None:  # this is the share and the codecs of one size: nothing here concerns them
            return method
        if method.fit is not None or method.layout.bases:
            raise MethodError("heterofl cannot resize a model that another part resizes already; keep one of them")
        return method._replace(fit=width_slices_fit(method.layout, ratios, scaler))

    return apply
