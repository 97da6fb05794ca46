"""How adapters are blended, by name: what each makes of a method over a layout with adapters."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sparing.core.errors import MethodError
from sparing.core.method import Method
from sparing.parts.size.lora.ranks import Ranks, adapter_layers, factor_side, leading_resize, ranks_fit


class AdapterBlend(NamedTuple):
    apply: Callable[[Method, Ranks], Method]
    trains_a: bool = True
    ranks_may_differ: bool = True


def average_factors(method: Method, ranks: Ranks) -> Method:
    """Both factors, each by itself: FedAvg as it is."""
    return method


def average_b(method: Method, ranks: Ranks) -> Method:
    """B alone, A being frozen: column by column over those who have it."""
    if not ranks.differ:
        return method
    resize = leading_resize(ranks, both=False, votes_for_all=False)
    return method._replace(fit=ranks_fit(method.layout, ranks, resize, within=True))


BLENDS: dict[str, AdapterBlend] = {
    "average": AdapterBlend(average_factors, ranks_may_differ=False),
    "freeze-a": AdapterBlend(average_b, trains_a=False),
}


def find_blend(name: str, ranks: Ranks) -> AdapterBlend:
    found = BLENDS[name]
    if ranks.differ and not found.ranks_may_differ:
        others = " or ".join(other for other, one in BLENDS.items() if one.ranks_may_differ)
        raise MethodError(
            f"lora.blend is {name!r}, which needs equal ranks, but lora.ranks offers {list(ranks.offered)}; set "
            f"lora.blend to {others}, or offer one rank"
        )
    return found


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
