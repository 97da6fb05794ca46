from sparing.core.codec import chain
from sparing.core.compose import broadcast_by
from sparing.core.method import Broadcast, Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import quantisers, sparsifiers


@recipe("stc", paper="Sattler et al. 2019, arXiv:1903.02891")
def stc(ratio: float = 0.01, down: bool = True) -> Recipe:
    """Sparse ternary compression: sign and mean magnitude of each layer's top-k, error feedback, both directions."""

    def apply(method: Method) -> Method:
        codec = chain(sparsifiers.topk_codec(method.layout, ratio), quantisers.sign_codec(method.layout))
        method = method._replace(up=(*method.up, codec._replace(name="stc")), memory=True)
        if not down:
            return method
        return broadcast_by(method, Broadcast((codec._replace(name="stc"),)))

    return apply
