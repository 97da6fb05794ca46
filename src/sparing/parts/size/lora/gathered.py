"""Blends of adapters by their products, of whatever rank: M is a sum of products, cut to what the server keeps.

    svd           M = sum_k w_k P_k                                                        (FlexLoRA)
    partitioned   the same of each column of B_k and row of A_k, over those who have it; what nobody has stays (raFLoRA)
    increments    M + sum_k w_k (P_k - T_k), T_k being the product that k was sent

with P_k = s_k B_k A_k. T_k is the leading part of M, so the last is a sum of what is left of M's directions and of
products, without a difference: direction i counts with the weight of the clients of a rank below i.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.method import Gathering, Remembered, Report, Resize
from sparing.core.threads import work_side_by_side
from sparing.core.tree import Layout, Masks, Tree
from sparing.parts.size.lora.adapted import A, B, keyed_rows
from sparing.parts.size.lora.products import Pair, factors_cut, strongest_directions
from sparing.parts.size.lora.ranks import Ranks, adapter_layers, factor_side, leading_columns

Mix = Callable[[Pair, list[Pair], Tensor], list[Pair]]
"""(the server's factors, everyone's, weights that sum to 1) -> factors whose products sum to M; scales are in B."""
INSTEAD = "set lora.blend to average or freeze-a, whose coordinates last"


def sum_of_products(server: Pair, came: list[Pair], weight: Tensor) -> list[Pair]:
    return [(w * b, a) for w, (b, a) in zip(weight, came, strict=True)]


def sum_of_increments(server: Pair, came: list[Pair], weight: Tensor) -> list[Pair]:
    unseen = torch.zeros(server[0].shape[1], dtype=torch.float64)
    for w, (b, _) in zip(weight, came, strict=True):
        unseen[b.shape[1] :] += w
    return [_without_zeros(server, unseen), *sum_of_products(server, came, weight)]


def sum_of_partitions(server: Pair, came: list[Pair], weight: Tensor, most: int) -> list[Pair]:
    voted = torch.zeros(server[0].shape[1], dtype=torch.float64)
    for w, (b, _) in zip(weight, came, strict=True):
        voted[: b.shape[1]] += w
    stays = (voted == 0) & (torch.arange(len(voted)) < most)
    mixed = [(b * (w / voted[: b.shape[1]]), a) for w, (b, a) in zip(weight, came, strict=True)]
    return [_without_zeros(server, stays.double()), *mixed]


def _without_zeros(pair: Pair, factor: Tensor) -> Pair:
    """Columns of B times these numbers, without those that are zero."""
    b = pair[0] * factor
    some = b.any(dim=0)
    return b[:, some], pair[1][some]


class CutLayer(NamedTuple):
    """What the server keeps of a layer."""

    path: str
    b: Tensor
    a: Tensor
    truncated: float  # relative
    energy: float  # of all directions


def gathered_resize(layout: Layout, ranks: Ranks, mix: Mix, keep: int) -> Resize:
    """Clients get the strongest directions; where B has a zero column, the row of A that all of them draw."""
    layers = adapter_layers(layout)

    def shrink(state: Remembered, model: Tree, size: int, ctx: Ctx) -> Tree:
        rank, out = ranks.offered[size], {}
        ratio = math.sqrt(ranks.ratio(rank))
        for name, x in model.items():
            out[name] = leading_columns(name, x, rank)
            if ratio == 1 or not (side := factor_side(name)):
                continue
            factor = x.new_tensor(1 / ratio)
            if side == "a":
                b = leading_columns(f"{name.removesuffix(A)}{B}", model[f"{name.removesuffix(A)}{B}"], rank)
                live = b.reshape(*b.shape[:3], -1).any(3).any(1)
                factor = torch.where(live, factor, 1.0).reshape(*live.shape, *[1] * (x.ndim - 2))
            out[name] = out[name] * factor
        return out

    def blend(model: Tree, came: list[Tree], weight: Tensor, ctx: Ctx) -> tuple[Tree, Report]:
        share, scale = (weight / sum(weight.tolist())).double().cpu(), ranks.scale_at(ranks.most)
        values, report, lost, whole = {}, {}, 0.0, 0.0

        def cut(path: str) -> CutLayer:
            one, other = model[f"{path}.{B}"], model[f"{path}.{A}"]
            pairs = [matrices_of(x[f"{path}.{B}"], x[f"{path}.{A}"], ranks) for x in came]
            server = scale * one[0].flatten(1).double().cpu(), other[0].flatten(1).double().cpu()
            found = strongest_directions(mix(server, pairs, share))
            rows = keyed_rows(path, ctx.seed, ctx.round, other.shape[1], tuple(other.shape[2:])).flatten(1)
            (b, a), truncated = factors_cut(found, keep, scale, rows)
            factors = b.reshape(one.shape).to(one.device), a.reshape(other.shape).to(other.device)
            return CutLayer(path, *factors, truncated, float(found.s.square().sum()))

        def take(found: CutLayer) -> None:
            nonlocal lost, whole
            values[f"{found.path}.{B}"], values[f"{found.path}.{A}"] = found.b, found.a
            report[f"truncated/{found.path}"] = found.truncated
            lost, whole = lost + found.truncated**2 * found.energy, whole + found.energy

        work_side_by_side(layers, cut, take, torch.get_num_threads())
        return values, report | {"truncation_error": (lost / whole) ** 0.5 if whole else 0.0}

    def grow(resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, Masks]:
        return resized, dict.fromkeys(resized)  # gathered as they are

    names = frozenset(name for name in layout.shapes if factor_side(name))
    return Resize(shrink, grow, gathering=Gathering(names, blend, INSTEAD))


def matrices_of(b: Tensor, a: Tensor, ranks: Ranks) -> Pair:
    """A client's factors as float64 on the host, its scale in B."""
    return ranks.scale_at(len(a)) * b.flatten(1).double().cpu(), a.flatten(1).double().cpu()
