from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import tight as parts


@recipe("tight", paper="asymmetric numeral systems, Duda 2013, arXiv:1311.2540")
def tight() -> Recipe:
    """Lossless coding of positions and quantised values by the smallest of several codes; put it last."""

    def apply(method: Method) -> Method:
        if not method.up:
            raise MethodError("tight has nothing to write: values go up as they are; put topk, int8 or the like first")
        return method._replace(up=(*method.up, parts.tight_codec()))

    return apply
