"""Adapters padded with zeros and averaged, every layer by the norms of its products (HetLoRA).

Client k's sqrt(s_k) B_k and sqrt(s_k) A_k count |P_k| / sum_j |P_j| of their layer, P_k = s_k B_k A_k. As updates come,
each layer's is multiplied by its norm and divided by the samples that the client counts elsewhere; the mean is put
right once all norms are known. So it stays a fold.
"""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import Arrival, Blended, Method, Report, Step
from sparing.core.threads import intra_op
from sparing.core.tree import Layout, Tree, column
from sparing.parts.size.lora.adapted import A, B
from sparing.parts.size.lora.ranks import adapter_layers

STEP = "lora.blend: padded"


def norm_weighted_step(layout: Layout) -> Step:
    """Layers of which a factor is personal have no product here; they count as everything else does."""
    known = adapter_layers(layout)

    def places_in(tree: Tree) -> dict[str, int]:
        both = [path for path in known if f"{path}.{A}" in tree and f"{path}.{B}" in tree]
        return {f"{path}.{end}": i for i, path in enumerate(both) for end in (A, B)}

    def receive(state: Tree, arrival: Arrival) -> Arrival:
        ctx, places = arrival.ctx, places_in(arrival.update)
        layers = list(dict.fromkeys(name.rpartition(".lora_")[0] for name in places))
        whole = {name: (arrival.model[name] + arrival.update[name]).flatten(2) for name in places}
        found = [product_norms(whole[f"{path}.{B}"], whole[f"{path}.{A}"]) for path in layers]
        norms = torch.stack(found, 1) if found else torch.zeros(len(ctx.ids), 0, dtype=torch.float64)
        factor = norms * (ctx.samples / ctx.clients / ctx.placed(ctx.n))[:, None]  # about the size of the norms
        update = dict(arrival.update)
        for name, i in places.items():
            x = update[name]
            update[name] = (x.double() * column(factor[:, i], x)).to(x.dtype)
        return arrival._replace(update=update, notes=arrival.notes | {"factor": factor})

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {"factor": arrival.notes["factor"]}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        factor, weight = blended.seen["factor"], blended.weight.tolist()
        mean = torch.zeros_like(factor[0])
        for one, w in zip(factor, weight, strict=True):
            mean += one * (w / sum(weight))
        places = places_in(blended.update)
        right = torch.where(mean > 0, 1 / mean, 0.0)
        update = {n: x * right[places[n]].to(x.device) if n in places else x for n, x in blended.update.items()}
        return update, state, {}

    return Step(apply, watch=watch, name=STEP, receive=receive, needs_mean=True)


def product_norms(b_K: Tensor, a_K: Tensor) -> Tensor:
    """|B A| of `[K, m, r]` and `[K, r, n]`, from r x r matrices: `[K]` float64. Row by row, on one thread."""
    with intra_op(1):
        found = [((b.mT @ b) * (a @ a.mT)).sum() for b, a in zip(b_K.double(), a_K.double(), strict=True)]
    return torch.stack(found).clamp(min=0).sqrt()


def refuse_whole_lookers(method: Method) -> None:
    """A rule: nothing else may look at updates, in which layers are weighed apart."""
    blend = method.blend
    others = [step.name for step in blend.steps if step.name != STEP and (step.looks or step.needs_mean)]
    others += [blend.weigh.name] if blend.weigh.name != "samples" else []
    if others:
        raise MethodError(
            f"lora.blend is 'padded', which weighs clients in every layer by itself, but {others[0]!r} "
            "weighs or compares whole updates; drop it, or set lora.blend to average"
        )
