from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import dgc as parts
from sparing.parts.code import sparsifiers


@recipe("dgc", paper="Lin et al. 2018, arXiv:1712.01887")
def dgc(
    ratio: float = 0.01, momentum: float = 0.9, clip: float | None = None, warmup: int = 0, over: str = "layer"
) -> Recipe:
    """Deep gradient compression: top-k of each client's accumulated unsent update, with momentum correction."""
    share = parts.ratio_ramp(ratio, warmup)

    def apply(method: Method) -> Method:
        layout, home = method.layout, method.share.private | method.share.values
        names = [n for n in layout.floats if n not in home]
        codec = parts.dgc_codec(
            layout, names, lambda t: sparsifiers.topk_codec(layout, share(t), over=over), momentum, clip
        )
        return method._replace(up=(*method.up, codec))

    return apply
