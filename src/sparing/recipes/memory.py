from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe


@recipe("memory", paper="Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847")
def memory() -> Recipe:
    """Error feedback: a client adds what compression left out to its next update."""

    def apply(method: Method) -> Method:
        return method._replace(memory=True)

    return apply
