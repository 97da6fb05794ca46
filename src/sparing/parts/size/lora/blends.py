"""How adapters are blended, by name: what each makes of a method over a layout with adapters."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from sparing.core.compose import collected_by, with_rule
from sparing.core.errors import MethodError, check_range, unsummable
from sparing.core.fold import mean_of_voters
from sparing.core.method import Method
from sparing.parts.size.lora import exact, gathered, padded, stacked
from sparing.parts.size.lora.merged import with_merged
from sparing.parts.size.lora.ranks import Ranks, adapter_layers, factor_side, leading_resize, ranks_fit

Keep = int | Literal["largest", "all"]
_EVERYTHING = 1 << 30  # a rank that no layer has


class AdapterBlend(NamedTuple):
    apply: Callable[[Method, Ranks, int], Method]  # (method, ranks, what the server keeps)
    keeps: bool = False  # whether the server may keep another rank than its largest client's
    trains_a: bool = True
    ranks_may_differ: bool = True
    merges: bool = False  # whether the server adds to the frozen layers
    anew: bool = False  # whether adapters start anew each round
    travels: Callable[[Method], Method] = lambda method: method  # what it makes of the method as any size sees it


def average_factors(method: Method, ranks: Ranks, keep: int) -> Method:
    """Both factors, each by itself: FedAvg as it is."""
    return method


def average_b(method: Method, ranks: Ranks, keep: int) -> Method:
    """B alone, A being frozen: column by column over those who have it."""
    if not ranks.differ:
        return method
    resize = leading_resize(ranks, both=False, votes_for_all=False)
    return method._replace(fit=ranks_fit(method.layout, ranks, resize, within=True))


def average_padded(method: Method, ranks: Ranks, keep: int) -> Method:
    """Both factors, with zeros in the columns that a client does not have, by the norms of products."""
    steps = (padded.norm_weighted_step(method.layout), *method.blend.steps)
    method = with_rule(method._replace(blend=method.blend._replace(steps=steps)), padded.refuse_whole_lookers)
    if not ranks.differ:
        return method
    resize = leading_resize(ranks, both=True, votes_for_all=True)
    return method._replace(fit=ranks_fit(method.layout, ranks, resize, within=True))


def gather_products(mix: str, method: Method, ranks: Ranks, keep: int) -> Method:
    """The products of everyone, by one of `MIXES`; layers that train whole are averaged as elsewhere."""
    if method.summed is not None:
        raise unsummable(f"lora.blend {mix!r} needs the factors of each client; {gathered.INSTEAD}")
    resize = gathered.gathered_resize(method.layout, ranks, MIXES[mix](ranks), keep)
    fit = ranks_fit(method.layout, ranks, resize, within=False)
    return collected_by(method, f"lora.blend: {mix}", mean_of_voters)._replace(fit=fit)


def average_exactly(method: Method, ranks: Ranks, keep: int) -> Method:
    """Both factors, each by itself, and what the mean of products has beyond that joins the base."""
    if method.summed is not None:
        raise unsummable(f"lora.blend 'exact' needs the factors of each client; {gathered.INSTEAD}")
    steps = (exact.residual_step(method.layout, ranks.scale_at(ranks.most)), *method.blend.steps)
    return with_rule(method._replace(blend=method.blend._replace(steps=steps)), exact.refuse_other_means)


def stack_factors(method: Method, ranks: Ranks, keep: int) -> Method:
    """The products of everyone join the base."""
    if method.summed is not None:
        raise unsummable(f"lora.blend 'stack' needs the factors of each client; {gathered.INSTEAD}")
    resize = stacked.stacked_resize(adapter_layers(method.layout), ranks)
    fit = ranks_fit(method.layout, ranks, resize, within=False)
    return collected_by(method, "lora.blend: stack", mean_of_voters)._replace(fit=fit)


def travel_stacked(method: Method) -> Method:
    return stacked.with_new_adapters(with_merged(method))


MIXES: dict[str, Callable[[Ranks], gathered.Mix]] = {
    "svd": lambda ranks: gathered.sum_of_products,
    "partitioned": lambda ranks: partial(gathered.sum_of_partitions, most=ranks.most),
    "increments": lambda ranks: gathered.sum_of_increments,
}
BLENDS: dict[str, AdapterBlend] = {
    "average": AdapterBlend(average_factors, ranks_may_differ=False),
    "freeze-a": AdapterBlend(average_b, trains_a=False),
    "padded": AdapterBlend(average_padded),
    "exact": AdapterBlend(average_exactly, ranks_may_differ=False, merges=True, travels=with_merged),
    "stack": AdapterBlend(stack_factors, merges=True, anew=True, travels=travel_stacked),
    **{mix: AdapterBlend(partial(gather_products, mix), keeps=True) for mix in MIXES},
}


def find_blend(name: str | None, ranks: Ranks) -> AdapterBlend:
    """By default the one that suits these ranks."""
    name = name or ("increments" if ranks.differ else "average")
    found = BLENDS[name]
    if ranks.differ and not found.ranks_may_differ:
        others = " or ".join(other for other, one in BLENDS.items() if one.ranks_may_differ)
        raise MethodError(
            f"lora.blend is {name!r}, which needs equal ranks, but lora.ranks offers {list(ranks.offered)}; set "
            f"lora.blend to {others}, or offer one rank"
        )
    return found


def kept_rank(keep: Keep, blend: AdapterBlend, ranks: Ranks) -> int:
    """Of what the server keeps, as far as a layer has it."""
    if keep == "largest":
        return ranks.most
    if not blend.keeps:
        others = " or ".join(name for name, one in BLENDS.items() if one.keeps)
        raise MethodError(
            f"lora.keep is {keep!r}, but only where products are blended can the server keep another rank; drop it, or "
            f"set lora.blend to {others}"
        )
    if keep == "all":
        return _EVERYTHING
    check_range("lora.keep", keep, 1, float("inf"))
    return keep


def refuse_unadapted(method: Method, full: Sequence[str]) -> None:
    """The layout must be that of the remade network: adapters, the layers named in `full`, and nothing else."""
    if not adapter_layers(method.layout):
        raise MethodError("lora needs the layout of a model with adapters, and finds none in it; call `remade` first")
    for name in method.layout.params:
        if not factor_side(name) and not any(f".{word}." in f".{name}." for word in full):
            raise MethodError(
                f"lora: {name!r} of the base is not frozen; let it not require gradients, or name it in lora.full"
            )


def refuse_other_sizes(method: Method) -> Callable[[Method], None]:
    """A rule: no other recipe may resize the model of this method."""

    def rule(found: Method) -> None:
        if found.fit is not method.fit:
            raise MethodError("lora gives adapters their ranks, and another recipe resizes them; keep one of them")

    return rule
