from typing import Literal

from sparing.core.compose import with_rule
from sparing.core.method import Method, Recipe
from sparing.core.registry import recipe
from sparing.parts.blend.stein import SteinSettings, refuse_stein_twice
from sparing.parts.blend.stein import stein_step as shrinkage
from sparing.parts.code import sparsifiers

PAPER = "James and Stein 1961; shrinkage of the averaged update"


@recipe("stein", paper=PAPER)
def stein(
    beta: float = 0.9,
    warmup: int = 5,
    target: Literal["ema", "zero", "uniform"] = "ema",
    beta_role: Literal["target", "coefficient"] = "target",
    estimator: Literal["consistent", "literal"] = "consistent",
    population: Literal["finite", "infinite"] = "finite",
    learn_beta: bool = False,
    only: float = 1.0,
) -> Recipe:
    """Shrink each layer's averaged update towards its running mean, more where clients disagree more."""
    settings = SteinSettings(beta, warmup, target, beta_role, estimator, population, learn_beta, only)

    def apply(method: Method) -> Method:
        step = shrinkage(method.layout, settings, method.summed is not None)
        method = with_rule(method, refuse_stein_twice)
        steps = (step, *method.blend.steps)  # it looks at what arrived, so it comes before the other steps
        return method._replace(blend=method.blend._replace(steps=steps))

    return apply


@recipe("sr-fedavg", paper=PAPER)
def sr_fedavg(
    beta: float = 0.9,
    warmup: int = 5,
    beta_role: Literal["target", "coefficient"] = "target",
    topk: float | None = None,
) -> Recipe:
    """FedAvg with Stein-rule shrinkage of the averaged update, and optionally top-k."""
    shrink = stein(beta, warmup, beta_role=beta_role)

    def apply(method: Method) -> Method:
        if topk is not None:
            method = method._replace(up=(*method.up, sparsifiers.topk_codec(method.layout, topk)))
        return shrink(method)

    return apply
