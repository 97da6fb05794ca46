from sparing.core.compose import narrow_share
from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.share import personal as parts


@recipe("lg-fedavg", paper="Liang et al. 2020, arXiv:2001.01523")
def lg_fedavg(layers: list[str] | None = None, shared: list[str] | None = None) -> Recipe:
    """Keep the representation (by default all but the last layer) on the client and share the head."""

    def apply(method: Method) -> Method:
        layout = method.layout
        home = parts.personal_tensors(layout, layers, shared)
        if layers is None and shared is None:
            home = frozenset(layout.shapes) - home
        if not home - layout.buffers:
            raise MethodError("lg-fedavg keeps the representation at home, but no layer is left for it; name some")
        return method._replace(share=narrow_share(method.share, parts.stay_home_share(layout, home)))

    return apply
