from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import server_optimisers


@recipe("fedavgm", paper="Hsu et al. 2019, arXiv:1909.06335")
def fedavgm(beta: float = 0.9, lr: float = 1.0) -> Recipe:
    """SGD with momentum as the server optimiser."""

    def apply(method: Method) -> Method:
        step = server_optimisers.server_momentum_step(method.layout, beta, lr)
        return method._replace(blend=method.blend._replace(steps=(*method.blend.steps, step)))

    return apply
