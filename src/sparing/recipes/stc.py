from sparing.core.codec import chain
from sparing.core.protocols import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts import broadcast, quant, sparse


@recipe("stc", paper="Sattler et al. 2019, arXiv:1903.02891")
def stc(ratio: float = 0.01, down: bool = True) -> Recipe:
    """Send the signs and the mean magnitude of each layer's largest entries, with memory; the server does the same."""

    def apply(method: Method) -> Method:
        codec = chain(sparse.topk(method.layout, ratio), quant.sign(method.layout))
        method = method._replace(up=(*method.up, codec._replace(name="stc")), memory=True)
        if not down:
            return method
        step = broadcast.broadcast(method.layout, codec, "stc", method.share.private)
        return method._replace(blend=method.blend._replace(steps=(*method.blend.steps, step)))

    return apply
