from collections.abc import Sequence
from typing import Literal

from sparing.core.compose import with_rule
from sparing.core.errors import MethodError, check_range
from sparing.core.method import Method, Phase, Recipe
from sparing.core.registry import recipe
from sparing.parts.size.fedhm import low_rank, rank_partitions, rank_weights


@recipe("fedhm", paper="Yao et al. 2021, arXiv:2111.14655")
def fedhm(
    ratios: Sequence[float] = (1, 0.5, 0.25, 0.125),
    full: int | None = None,
    keep: Sequence[str] = (),
    weighting: Literal["ratio", "factor", "uniform", "samples"] = "ratio",
    temperature: float = 1.0,
    decay: float = 1e-4,
    blend: Literal["increments", "products", "partitioned"] = "increments",
    step: float | None = 4.0,
) -> Recipe:
    """Clients train low-rank factors of the weights, each at a rank that fits its resources.

    `blend: increments`, the default, adds up what clients changed. Averaging their `products`, as published, counts
    what truncation cut away as votes for zero, and the model loses its rank. `step` is how far gradients may go, the
    learning rate and momentum counted in, where some clients train factors and the study has no `local.clip`.
    """
    check_range("fedhm.decay", decay, 0, float("inf"))
    if step is not None:
        check_range("fedhm.step", step, 0, float("inf"), open_low=True)
    ratios = tuple(ratios)

    def apply(method: Method) -> Method:
        if method.size is not None:  # this is the share and the codecs of one size: nothing here concerns them
            return method
        if method.fit is not None or method.layout.bases:
            raise MethodError("fedhm cannot resize a model that another part resizes already; keep one of them")
        fit = low_rank.low_rank_fit(method.layout, ratios, full, keep)
        weigh, steps = method.blend.weigh, method.blend.steps
        if weighting != "samples":
            if weigh.name != "samples":
                raise MethodError(
                    f"fedhm and {weigh.name} both say how much a client counts; drop one, or set fedhm.weighting to "
                    f"samples, which leaves it to {weigh.name}"
                )
            weigh = rank_weights.rank_weigh(weighting, temperature, ratios, fit.sizes)
        if blend == "products":
            steps = (*steps, rank_weights.history_step(weighting, temperature, ratios, fit.sizes))
        elif blend == "increments":
            fit = fit._replace(resize=fit.resize._replace(increments=True))
        elif any(ratio < 1 for ratio in ratios):
            partition = rank_partitions.rank_partitions(method.layout, fit.layouts)
            fit = fit._replace(resize=fit.resize._replace(partition=partition))
            method = with_rule(method, rank_partitions.refuse_lookers)
        limit = step if any(ratio < 1 for ratio in ratios) else None
        phases = tuple(bounded(phase, limit) for phase in method.local.phases)
        phases = tuple(phase._replace(frobenius=decay) for phase in phases)
        method = method._replace(fit=fit, local=method.local._replace(phases=phases))
        return method._replace(blend=method.blend._replace(weigh=weigh, steps=steps))

    return apply


def bounded(phase: Phase, step: float | None) -> Phase:
    """The same phase, in which no gradient adds up to a longer step; Adam's steps do not follow its size."""
    how = phase.optimiser
    if step is None or how.clip is not None or how.name != "sgd":
        return phase
    return phase._replace(optimiser=how._replace(clip=step * (1 - how.momentum) / how.lr))
