from sparing.core.errors import ConfigError, check_range
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe


@recipe("fedprox", paper="Li et al. 2018, arXiv:1812.06127")
def fedprox(mu: float = 0.01) -> Recipe:
    """Add a proximal term, mu / 2 |w - w_start|^2, to the local loss to keep clients near their starting point."""
    check_range("fedprox.mu", mu, 0, float("inf"))

    def apply(method: Method) -> Method:
        for phase in method.local.phases:
            if phase.prox:
                raise ConfigError(f"local.prox is {phase.prox:g} and fedprox.mu is {mu:g}, which are one; drop one")
        phases = tuple(phase._replace(prox=mu) for phase in method.local.phases)
        return method._replace(local=method.local._replace(phases=phases))

    return apply
