from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe


@recipe("fedavg", paper="McMahan et al. 2017, arXiv:1602.05629")
def fedavg() -> Recipe:
    """Share the whole model and average it, weighted by sample counts; the other recipes modify this."""

    def apply(method: Method) -> Method:
        return method

    return apply
