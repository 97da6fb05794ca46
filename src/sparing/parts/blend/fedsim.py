"""FedSim's weighing: a client counts by how much its model points the same way as the server's.

omega_k ~ max(cos(theta_k, theta), 0) * n_k^q over the shared parameters, where the client has a vote. A reference of
norm zero (the last mean update before there is one) has no direction to differ from: the cosine is 1, so omega_k ~
n_k^q. A client whose own norm is zero is left out.

A mean update can point where the next clients do not go. Those few that still do would then decide alone, the next
reference would be theirs, and in the end nobody would count and nothing move again. So where clients with half of the
cohort's n_k^q or more are not similar, the model stays as it was and the reference is forgotten: the next round is
FedAvg's, and each time twice as many rounds as the time before.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, check_range, unsummable
from sparing.core.method import LOSSLESS, Arrival, Blended, Codec, Report, Step, Summary, Trait, View, Weigh
from sparing.core.parcel import Parcel, Schema
from sparing.core.reduce import Term, dots, total
from sparing.core.tree import Layout, Masks, Tree, cleared, prefixed, under

NOTE = "similarity"
PAUSE = ("pause", "next_pause")
"""For how many rounds the reference stays forgotten, and for how many the next time."""
COLDEST = {"weights": 0.02, "updates": 0.2}
"""Below this, exp((cos - 1) / T) of cosines as they occur is too small beside the weights' grid to be told apart."""


class Similarity(NamedTuple):
    """What is compared, and how it counts."""

    q: float = 1.0
    on: str = "weights"  # of models with the server's, or "updates" with last round's mean update
    softmax: float | None = None
    at: str = "server"


def similarity_weigh(layout: Layout, home: frozenset[str], how: Similarity, summed: bool = False) -> Weigh:
    """Weights by the cosine of models with the server's, or of updates with last round's mean update.

    `summed`: the server sees sums only. Clients weigh themselves, which they can by models alone.
    """
    _refuse_settings(how)
    if summed and how.on == "updates":
        raise unsummable("fedsim compares single updates with the last mean one; with fedsim set `on: weights`")
    params = [name for name in layout.params if name not in home]
    counts = parameter_counts(layout, home)

    def init(model: Tree, clients: int) -> Tree:
        if how.on == "weights":
            return {}
        reference = {name: torch.zeros_like(model[name]) for name in params}
        device = next((x.device for x in reference.values()), None)
        return prefixed("reference", reference) | {x: torch.full((1,), i, device=device) for i, x in enumerate(PAUSE)}

    def of(state: Tree, arrival: Arrival) -> tuple[Tensor, dict[str, Tensor]]:
        if how.at == "client":
            cos_K = arrival.notes[NOTE].double().clamp(-1, 1)
        else:
            start = arrival.model if how.on == "weights" else {}
            found = {name: arrival.update[name] for name in params if name in arrival.update}
            reference = arrival.model if how.on == "weights" else under("reference", state)
            cos_K = cosine_similarity(found, start, reference, arrival.scope, arrival.ctx)
        n_K = arrival.notes["n"].to(cos_K)
        return _similarity_weights(cos_K, n_K, how), {"cos": cos_K, "n": n_K}

    def learn_from_sums(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Report]:
        cos = blended.seen["cos"][0]

        def numbers(cos: Tensor) -> dict[str, float]:
            return {**counts, **({"weighted_similarity": float(cos)} if bool(cos == cos) else {})}

        return state, Summary([cos], numbers)

    def learn(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Report]:
        _warn_of_nothing(blended, ctx, how)
        state, forgets = _renewed_reference(state, blended, ctx, how.q) if state else ({}, None)

        def numbers(cos: Tensor, weight: Tensor, *forgotten: Tensor) -> dict[str, float]:
            found = {**counts, **_cosine_numbers(cos.tolist()), **_share_numbers(weight.tolist())}
            return found | ({"reference_forgotten": float(forgotten[0])} if forgotten else {})

        said = [blended.seen["cos"], blended.weight, *([] if forgets is None else [forgets])]
        return state, Summary(said, numbers)

    def most(ctx: Ctx) -> float:
        return math.fsum(n**how.q for n in ctx.n.tolist())

    if summed:
        return Weigh(of, most, init, learn_from_sums, name="fedsim", pooled={"cos": 1})
    return Weigh(of, most, init, learn, name="fedsim")


def _refuse_settings(how: Similarity) -> None:
    check_range("fedsim.q", how.q, 0, 10)
    if how.on not in ("weights", "updates"):
        raise ConfigError(f"fedsim.on is {how.on!r}; use 'weights' or 'updates'")
    if how.softmax is not None:
        check_range(f"fedsim.softmax over {how.on}", how.softmax, COLDEST[how.on], math.inf)
    if how.at not in ("server", "client"):
        raise ConfigError(f"fedsim.at is {how.at!r}; use 'server' or 'client'")
    if (how.on, how.at) == ("updates", "client"):
        raise ConfigError("fedsim.on is 'updates', but fedsim.at is 'client', which has no last mean update; use one")


def _similarity_weights(cos_K: Tensor, n_K: Tensor, how: Similarity) -> Tensor:
    if how.softmax is None and how.q in (0, 1):
        return cleared(cos_K, cos_K > 0) * (n_K if how.q else 1.0)
    here = torch.stack([cos_K, n_K]).T.tolist()
    found = [_similarity_factor(cos, how.softmax) * n**how.q for cos, n in here]  # one by one: vectors round by place
    return torch.tensor(found, dtype=torch.float64).to(cos_K.device)


def _warn_of_nothing(blended: Blended, ctx: Ctx, how: Similarity) -> None:
    """Of clients, or of a whole cohort, that do not count."""
    cos, weight, ids = blended.seen["cos"], blended.weight, blended.ids

    def only_zeros() -> str:
        who = ids[cos.isnan().cpu()].tolist()
        names = f"client {who[0]} has" if len(who) == 1 else f"clients {', '.join(map(str, who))} have"
        return f"round {ctx.round}: {names} nothing but zeros to compare; left out"

    def nobody() -> str:
        fix = "raise softmax" if how.softmax else "lower local.lr"
        return f"round {ctx.round}: nobody is similar to the server, so its model stays as it was; {fix}"

    ctx.require(~cos.isnan(), only_zeros)
    if how.on == "weights":
        ctx.require((weight > 0).any(), nobody)


def _renewed_reference(state: Tree, blended: Blended, ctx: Ctx, q: float) -> tuple[Tree, Tensor]:
    """The last mean update, or nothing while it is forgotten; and whether that begins now, bool `[1]`."""
    pause, coming = (state[name] for name in PAUSE)
    forgets = ~_cohort_follows(blended, q) & (pause == 0)
    ctx.require(
        ~forgets,
        lambda: (
            f"round {ctx.round}: most of the cohort is not similar to the last mean update, so the model stays as it "
            f"was and that update is forgotten: FedAvg's weights for {int(coming)} rounds from here"
        ),
    )
    pause = torch.where(forgets, coming, (pause - 1).clamp(min=0))
    reference = {n: cleared(_last_mean_update(x, blended, n), pause == 0) for n, x in under("reference", state).items()}
    return prefixed("reference", reference) | dict(zip(PAUSE, (pause, coming * (1 + forgets)), strict=True)), forgets


def _cohort_follows(blended: Blended, q: float) -> Tensor:
    """Whether those who count have more than half of the cohort's n_k^q."""
    n = blended.seen["n"].double() ** q
    return 2 * cleared(n, blended.weight > 0).sum() > n.sum()


def agreement_step(q: float) -> Step:
    """With `on: updates`: the model stays as it was where most of the cohort does not follow the reference."""

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {"n": arrival.notes["n"]}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        follows = _cohort_follows(blended, q)
        return {name: cleared(x, follows) for name, x in blended.update.items()}, state, {}

    return Step(apply, watch=watch, name="agreement")


def _last_mean_update(x: Tensor, blended: Blended, name: str) -> Tensor:
    """The last mean update, entry by entry: where nobody voted, that of the round in which somebody last did."""
    if name not in blended.update:
        return x
    new, mask = blended.update[name].to(x.dtype), blended.covered[name]
    return new if mask is None else torch.where(mask, new, x)


def _similarity_factor(cos: float, softmax: float | None) -> float:
    if cos != cos:
        return 0.0
    return max(cos, 0.0) if softmax is None else math.exp((cos - 1) / softmax)


def cosine_note_codec(layout: Layout, home: frozenset[str] = frozenset()) -> Codec:
    """The client compares its model with what it was sent, and adds the cosine to its notes."""
    params = [name for name in layout.params if name not in home]

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        after = {name: view.after[name] for name in params if name in parcel.leaves}
        scope = {name: parcel.leaves[name].scope for name in after}
        cos_K = cosine_similarity(after, {}, view.start, scope, view.ctx)
        return parcel._replace(notes=parcel.notes | {NOTE: cos_K.float()}), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        return expected._replace(notes=expected.notes | {NOTE: 1})

    return Codec(encode, schema=schema, name="fedsim", effect=LOSSLESS._replace(traits=Trait.SUMMABLE))


def cosine_similarity(rows: Tree, start: Tree, reference: Tree, scope: Masks, ctx: Ctx) -> Tensor:
    """cos(start + rows, reference) in scope, `[K]` float64: 1 if the reference is zero, else NaN for rows that are."""
    if not rows:
        return torch.ones(len(ctx.ids), dtype=torch.float64, device=ctx.device)
    terms = [Term(x, start.get(name), None, reference[name], scope.get(name)) for name, x in rows.items()]
    aa, ab, bb = total(dots(terms, len(ctx.ids)).flatten(0, 1)).view(3, -1)
    cos_K = (ab / (aa * bb).sqrt()).clamp(-1, 1)
    return cos_K.masked_fill(bb == 0, 1.0)


def parameter_counts(layout: Layout, home: frozenset[str]) -> dict[str, float]:
    personal = sum(math.prod(layout.shapes[name]) for name in layout.params if name in home)
    return {"shared_param_count": float(layout.size - personal), "personal_param_count": float(personal)}


def _cosine_numbers(cos: list[float]) -> dict[str, float]:
    """Mean and variance of those that are defined."""
    cos = [x for x in cos if x == x]
    if not cos:
        return {}
    mean = math.fsum(cos) / len(cos)
    return {"avg_similarity": mean, "similarity_variance": math.fsum((x - mean) ** 2 for x in cos) / len(cos)}


def _share_numbers(weight: list[float]) -> dict[str, float]:
    """Of the normalised weights; all zero where nobody counted."""
    whole = math.fsum(weight)
    share = [w / whole if whole else 0.0 for w in weight]
    return {
        "max_weight": max(share),
        "min_weight": min(share),
        "weight_entropy": math.fsum(-w * math.log(w) for w in share if w > 0),
        "similar_clients": float(sum(w > 0 for w in share)),
    }
