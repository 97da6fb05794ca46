from sparing.core.codec import chain
from sparing.core.errors import ConfigError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import ef21 as parts
from sparing.parts.code import sparsifiers


@recipe("ef21", paper="Richtarik et al. 2021, arXiv:2106.05203; Fatkhullin et al. 2021, arXiv:2110.03294")
def ef21(ratio: float | None = None) -> Recipe:
    """EF21 error feedback: the compressors before it send corrections to an estimate that both ends keep."""

    def apply(method: Method) -> Method:
        if method.up and ratio is not None:
            raise ConfigError(f"ef21.ratio is {ratio}, but ef21 uses {method.up[-1].name!r} before it; drop one")
        layout, home = method.layout, method.share.private | method.share.values
        names = [n for n in layout.floats if n not in home]
        codec = chain(*method.up) if method.up else sparsifiers.topk_codec(layout, 0.1 if ratio is None else ratio)
        steps = (*method.blend.steps, parts.ef21_estimate_step(names))
        method = method._replace(rules=(parts.refuse_other_sums, *method.rules))  # it speaks before those of its stages
        return method._replace(up=(parts.ef21_codec(layout, names, codec),), blend=method.blend._replace(steps=steps))

    return apply
