from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend import server_optimisers

FEDOPT = "Reddi et al. 2020, arXiv:2003.00295"


@recipe("fedadam", paper=FEDOPT)
def fedadam(lr: float = 0.03, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Recipe:
    """Adam as the server optimiser."""
    return stepping("fedadam", lr, beta1, beta2, tau)


@recipe("fedyogi", paper=FEDOPT)
def fedyogi(lr: float = 0.03, beta1: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> Recipe:
    """Yogi as the server optimiser: like Adam, but its effective learning rate cannot grow quickly."""
    return stepping("fedyogi", lr, beta1, beta2, tau)


@recipe("fedadagrad", paper=FEDOPT)
def fedadagrad(lr: float = 0.03, beta1: float = 0.0, tau: float = 1e-3) -> Recipe:
    """Adagrad as the server optimiser."""
    return stepping("fedadagrad", lr, beta1, 0.0, tau)


def stepping(kind: str, lr: float, beta1: float, beta2: float, tau: float) -> Recipe:
    def apply(method: Method) -> Method:
        step = server_optimisers.adaptive_server_step(method.layout, kind, lr, beta1, beta2, tau)
        return method._replace(blend=method.blend._replace(steps=(*method.blend.steps, step)))

    return apply
