"""pFedSim as published: after a warm-up of FedAvg, each client gets its own blend of those with heads like its own.

s_ij = max(0, mean over classes of cos(head_i[c], head_j[c])), renewed whenever i and j take part together; blending
weights are v_ij = -log(1 - s_ij) with s_ij at most 1 - 1e-4 = s_ii, normalised over j with s_ij > 0. Of the head only
the weight rows are compared, not the bias.

The server keeps each client's latest extractor in its rows and the similarities as sorted pairs i * clients + j with
their values, both ways round; a client's extractor is built when it is next served. A client whose extractor is not
there yet gets the server's, the sample-weighted mean of the last cohort's.
"""

import math

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError, check_range, unsummable
from sparing.core.method import Arrival, Blended, Method, Report, Rows, Rule, Serving, Share, Step, by_samples
from sparing.core.parcel import Cut, Cuts
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, cleared, column, prefixed

TOP = 1 - 1e-4
"""The largest similarity, and that of a client with itself."""
_KEPT = "model"


def is_warm_up(ctx: Ctx, warmup: float) -> bool:
    """Whether this is still a round of plain FedAvg."""
    return ctx.round <= math.floor(warmup * ctx.rounds + 0.5)


def heads_up_share(layout: Layout, home: frozenset[str], warmup: float) -> Share:
    """After the warm-up only what is compared of the personal layers goes up, as it is, and none of them down.

    A client that the server never met gets the server's, for a start.
    """
    check_range("pfedsim.warmup", warmup, 0, 1)
    whole: Cuts = {name: Cut() for name in layout.shapes}
    back = {name: cut for name, cut in whole.items() if name not in home or name == compared_head(layout, home)}

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        if is_warm_up(ctx, warmup):
            return whole
        new_K = ctx.placed(torch.zeros(1, dtype=torch.bool) if ctx.first is None else ctx.first)
        cuts = dict(whole)
        for name in home:
            cuts[name] = Cut(column(new_K, model[name]).expand(-1, *layout.shapes[name]))
        return cuts

    return Share(down, up=lambda got, ctx: whole if is_warm_up(ctx, warmup) else back, own=home, values=home)


def neighbours_step(layout: Layout, home: frozenset[str], warmup: float, apart: frozenset[str], counts: Report) -> Step:
    """The server's side. `apart` are tensors it never sees, `counts` what it reports every round."""
    head = compared_head(layout, home)
    classes = layout.shapes[head][0]
    kept = [n for n in layout.shapes if n not in home | apart and layout.dtypes[n].is_floating_point]
    grain = 2.0 ** ((52 - math.ceil(math.log2(max(classes, 2)))) // 2)  # products of such numbers add up exactly

    def init(model: Tree, clients: int) -> Tree:
        where = model[head].device
        return {
            "pairs": torch.zeros(0, dtype=torch.int64, device=where),
            "similarity": torch.zeros(0, device=where),
            "stored": torch.zeros(clients, dtype=torch.bool, device=where),
        }

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        """Every arrival's head, each class of length one, and its extractor."""
        if is_warm_up(arrival.ctx, warmup):
            return {}
        k = len(arrival.ctx.ids)
        rows = cleared(arrival.model[head].double() + arrival.update[head], arrival.scope[head])
        rows = rows.reshape(k * classes, -1)
        norm = total(rows * rows).sqrt()[:, None]
        unit = torch.round(rows / norm.masked_fill(~(norm > 0), 1.0) * grain) / grain
        models = {
            name: arrival.model[name] + arrival.update[name]
            if name in arrival.update
            else arrival.model[name].expand(k, *layout.shapes[name])
            for name in kept
        }
        return {"head": unit.reshape(k, -1)} | prefixed(_KEPT, models)

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        if is_warm_up(ctx, warmup):
            share = blended.weight / blended.weight.sum()
            return blended.update, state, {**counts, **_weight_numbers([share.tolist()])}
        cos = blended.seen["head"] @ blended.seen["head"].T / classes
        ids, update = ctx.placed(blended.ids), dict(blended.update)
        stored = state["stored"].clone()
        stored[ids] = True
        state = renewed_similarities(state, ids, cos, ctx.clients) | {"stored": stored}
        for name in home & update.keys():
            del update[name]  # the server's own head is the last one that was averaged
        weights = [list(row.values()) for row in neighbour_weights(state, ids, ctx.clients)]
        return update, state, {**counts, **_pair_numbers(cos), **_weight_numbers(weights)}

    def serve(state: Tree, model: Tree, ctx: Ctx, rows: Rows | None) -> tuple[Tree, dict[str, Tensor]]:
        return (
            model if rows is None or is_warm_up(ctx, warmup) else model | _neighbour_blends(state, model, ctx, rows)
        ), {}

    def row(model: Tree) -> Tree:
        return {name: model[name] for name in kept}

    return Step(apply, init, watch, "pfedsim", serving=Serving(serve, row=row, keep=_KEPT))


def _neighbour_blends(state: Tree, model: Tree, ctx: Ctx, rows: Rows) -> Tree:
    """Each of these clients' blend of those like it; the server's extractor for those of whom none is there yet."""
    ids = ctx.placed(ctx.ids)
    known_K = state["stored"][ids]
    known = known_K.tolist()
    if not any(known):
        return {}
    found = neighbour_weights(state, ids, ctx.clients)
    who = sorted({j for row, is_known in zip(found, known, strict=True) if is_known for j in row})
    place = {j: m for m, j in enumerate(who)}
    weight = np.zeros((len(found), len(who)))
    for k in (k for k, is_known in enumerate(known) if is_known):
        weight[k, [place[j] for j in found[k]]] = list(found[k].values())
    blends = rows.mix(torch.tensor(who), torch.from_numpy(weight))
    if all(known):
        return blends
    return {name: torch.where(column(known_K, x), x, model[name]) for name, x in blends.items()}


def refuse_unpublished(head: str, home: frozenset[str]) -> Rule:
    """The published form needs whole models and heads of all clients, averaged as FedAvg does."""

    def rule(method: Method) -> None:
        share, weigh = method.share, method.blend.weigh
        if method.summed is not None:
            raise unsummable("pfedsim's published form compares the heads of single clients; use its mode: seed")
        if head in share.private:
            raise MethodError(
                f"pfedsim's published form compares {head!r} of the clients, but another part of the method keeps it "
                "at home; drop that part, or use mode: seed"
            )
        if share.own - share.private - home:
            raise MethodError(
                "pfedsim's published form keeps whole models of the clients, but partial sharing sends it parts; drop "
                "psfed, or use mode: seed"
            )
        if weigh.name != by_samples.name:
            raise MethodError(
                f"pfedsim's published form warms up with FedAvg, but {weigh.name!r} weighs otherwise; drop one of them"
            )

    return rule


def compared_head(layout: Layout, home: frozenset[str]) -> str:
    """The weight whose rows, one a class, say how alike two clients are: the last personal one that has rows."""
    for name in reversed(layout.params):
        if name in home and len(layout.shapes[name]) > 1:
            return name
    raise MethodError(
        "pfedsim's published form compares the clients' heads, but no personal layer has a weight with rows; "
        "make the last dense layer personal, or use mode: seed"
    )


def renewed_similarities(state: Tree, ids: Tensor, cos: Tensor, clients: int) -> Tree:
    """The similarities after these clients took part together, still sorted; pairs that are not alike are dropped."""
    new = off_diagonal(ids[:, None] * clients + ids)  # sorted, as ids are
    value = off_diagonal(cos.float())
    old = state["pairs"]
    met_now = torch.searchsorted(new, old).clamp(max=max(len(new) - 1, 0))
    stays = new[met_now] != old if len(new) else torch.ones_like(old, dtype=torch.bool)
    stays = torch.cat([stays, value > 0])
    pairs, similarity = torch.cat([old, new]), torch.cat([state["similarity"], value])
    order = pairs.masked_fill(~stays, clients * clients).argsort()[: int(stays.sum())]
    return {"pairs": pairs[order], "similarity": similarity[order]}


def off_diagonal(x: Tensor) -> Tensor:
    """`[n, n]` -> `[n * (n - 1)]`, row by row.

    >>> off_diagonal(torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8]]))
    tensor([1, 2, 3, 5, 6, 7])
    """
    n = len(x)
    return x.flatten()[1:].view(n - 1, n + 1)[:, :n].flatten() if n > 1 else x.flatten()[1:]


def neighbour_weights(state: Tree, ids: Tensor, clients: int) -> list[dict[int, float]]:
    """For each of these clients its neighbours, itself among them, and their weights, which add up to one."""
    pairs, similarity = state["pairs"], state["similarity"]
    ends = torch.stack([ids, *(torch.searchsorted(pairs, (ids + i) * clients) for i in (0, 1))]).T.tolist()
    found = [slice(a, b) for _, a, b in ends]
    other = torch.cat([pairs[at] for at in found]) % clients
    near = torch.stack([other.double(), torch.cat([similarity[at] for at in found]).double()], dim=1).tolist()
    out, past = [], 0
    for i, a, b in ends:
        alike = {int(j): s for j, s in near[past : past + b - a]}
        past += b - a
        value = {j: -math.log(1 - min(s, TOP)) for j, s in (alike | {i: TOP}).items()}
        whole = math.fsum(value.values())
        out.append({j: v / whole for j, v in value.items()})
    return out


def _pair_numbers(cos: Tensor) -> Report:
    if len(cos) < 2:
        return {}
    pairs = cos[tuple(torch.triu_indices(len(cos), len(cos), 1, device=cos.device))]
    mean, variance = torch.stack([pairs.mean(), pairs.var(correction=0)]).tolist()
    return {"avg_similarity": mean, "similarity_variance": variance}


def _weight_numbers(rows: list[list[float]]) -> Report:
    """Over all rows of weights; the entropy is their mean."""
    entropy = [math.fsum(-w * math.log(w) for w in row if w > 0) for row in rows]
    return {
        "max_weight": max(map(max, rows)),
        "min_weight": min(map(min, rows)),
        "weight_entropy": math.fsum(entropy) / len(rows),
    }
