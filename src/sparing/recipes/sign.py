from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.code import quantisers


@recipe("sign", paper="Bernstein et al. 2018, arXiv:1802.04434; Karimireddy et al. 2019, arXiv:1901.09847")
def sign(memory: bool = False) -> Recipe:
    """Send one sign bit per value and the mean magnitude of each layer."""

    def apply(method: Method) -> Method:
        return method._replace(up=(*method.up, quantisers.sign_codec(method.layout)), memory=method.memory or memory)

    return apply
