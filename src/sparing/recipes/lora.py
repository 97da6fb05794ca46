from collections.abc import Sequence
from typing import Literal

from torch import nn

from sparing.core.compose import with_rule
from sparing.core.errors import MethodError
from sparing.core.method import Method, Recipe, Remade
from sparing.core.registry import recipe
from sparing.parts.size.lora import blends
from sparing.parts.size.lora.adapted import AdapterSettings
from sparing.parts.size.lora.adapted_network import adapted_model
from sparing.parts.size.lora.ranks import Scale, ranks_of_options


@recipe(
    "lora",
    paper="Hu et al. 2021, arXiv:2106.09685; blends: docs/methods/lora.md",
)
def lora(
    rank: int = 8,
    alpha: float = 16.0,
    targets: Sequence[str] | None = None,
    ranks: Sequence[int] = (),
    blend: Literal["average", "freeze-a", "exact", "padded", "svd", "partitioned", "increments", "stack"] | None = None,
    scale: Scale | None = None,
    keep: blends.Keep = "largest",
    full: Sequence[str] = (),
) -> Recipe:
    """Freeze the network and train low-rank adapters beside some of its layers, each client at a rank it can afford.

    `ranks` is what is offered by capacity, in place of the one `rank`; `targets` are by default q_proj and v_proj, or
    what peft has wrapped; `full` names layers that train whole beside the adapters. `blend` is by default `average` at
    equal ranks, and `increments` where they differ. `keep` is the rank of what the server keeps of products, and so of
    the global model.
    """
    offered = ranks_of_options(rank, ranks, alpha, scale)
    how = blends.find_blend(blend, offered)
    kept = blends.kept_rank(keep, how, offered)

    def remake(model: nn.Module, static: bool, seed: int) -> nn.Module:
        most = offered.most
        settings = AdapterSettings(most, offered.scale_at(most), how.trains_a, seed, how.merges, how.anew)
        return adapted_model(model, targets, full, settings, kept)

    def apply(method: Method) -> Method:
        if method.size is not None:  # the share and the codecs of one size
            return how.travels(method)
        if method.fit is not None or method.layout.bases:
            raise MethodError("lora cannot resize a model that another part resizes already; keep one of them")
        blends.refuse_unadapted(method, full)
        method = how.apply(how.travels(method), offered, kept)
        return with_rule(method, blends.refuse_other_sizes(method))

    return Remade(apply, remake)
