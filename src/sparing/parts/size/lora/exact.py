"""Factors averaged apart, and what the mean of products has beyond their product joins everyone's base (FedEx-LoRA).

With B_k and A_k the factors of client k, Bm and Am their means, all of one scale s:

    R = sum_k w_k s (B_k - Bm)(A_k - Am)

so that W + R + s Bm Am = W + sum_k w_k s B_k A_k. As the w_k (B_k - Bm) add up to zero, the A of the last client may
stand in the place of Am, and of j clients only j - 1 have a part: the rank of R is at most (j - 1) r.
"""

import math

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import Arrival, Blended, Method, Report, Step
from sparing.core.tree import Layout, Tree
from sparing.parts.size.lora.adapted import A, B
from sparing.parts.size.lora.merged import change_of
from sparing.parts.size.lora.padded import product_norms
from sparing.parts.size.lora.products import Pair
from sparing.parts.size.lora.ranks import adapter_layers

STEP = "lora.blend: exact"


def residual_step(layout: Layout, scale: float) -> Step:
    """What everyone changed is kept until the end of the round; where a factor stays at home, nothing is."""
    known = adapter_layers(layout)

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        k, seen = len(arrival.ctx.ids), {}
        for path in known:
            if {f"{path}.{A}", f"{path}.{B}"} <= arrival.update.keys():
                for end in (A, B):
                    x = arrival.update[f"{path}.{end}"]
                    seen[f"{path}.{end}"] = x.expand(k, *x.shape[1:]).clone()
        return seen

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        weight, change, report = blended.weight.double().cpu(), {}, {}
        weight = weight / sum(weight.tolist())
        for path in known:
            if len(blended.ids) > 1 and f"{path}.{A}" in blended.seen:
                b, a = (blended.seen[f"{path}.{end}"].double().cpu().flatten(2) for end in (B, A))
                b, a = residual_factors(b, a, weight, scale)
                change |= change_of(path, (b, a))
                report[f"residual/{path}"] = float(product_norms(b[None], a[None]))
        whole = math.sqrt(sum(norm**2 for norm in report.values()))
        return blended.update | change, state, report | {"residual": whole}

    return Step(apply, watch=watch, name=STEP, needs_mean=True)


def residual_factors(b_K: Tensor, a_K: Tensor, weight: Tensor, scale: float) -> Pair:
    """Of B_k `[K, m, r]` and A_k `[K, r, n]`, or what they have beyond anything common, in that order."""
    mean = torch.zeros_like(b_K[0])
    for w, b in zip(weight, b_K, strict=True):
        mean += w * b
    away = [scale * w * (b - mean) for w, b in zip(weight[:-1], b_K, strict=False)]
    return torch.cat(away, 1), torch.cat([a - a_K[-1] for a in a_K[:-1]])


def refuse_other_means(method: Method) -> None:
    """A rule: what joins the base is made of the factors that clients sent, and so is what stays of them."""
    others = [step.name for step in method.blend.steps if step.name != STEP and step.needs_mean]
    if others:
        raise MethodError(
            f"lora.blend is 'exact', which adds to the base what the mean of clients' own products has beyond that of "
            f"their factors, but {others[0]!r} makes another mean of these; drop it, or set lora.blend to average"
        )
