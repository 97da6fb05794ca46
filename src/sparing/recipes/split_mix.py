from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe, Remade
from sparing.core.registry import recipe
from sparing.parts.size import split_mix as mix


@recipe("split-mix", paper="Hong et al. 2022, arXiv:2203.09747")
def split_mix(ratio: float = 0.125) -> Recipe:
    """Split the network into narrow ones trained separately; a client averages as many as fit its resources."""
    bases = mix.bases_for_ratio(ratio)

    def apply(method: Method) -> Method:
        if method.size is not None or bases == 1:
            return method
        if method.fit is not None:
            raise MethodError("split-mix cannot resize a model that another part resizes already; keep one of them")
        if method.layout.bases != bases:
            raise MethodError(
                f"split-mix needs the layout of a model split into {bases} bases, seen one of {method.layout.bases}; "
                "call `remade` first"
            )
        return method._replace(fit=mix.bases_fit(method.layout))

    return Remade(apply, lambda model, static, seed: mix.split_by_width(model, bases, static, seed))
