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
import warnings

import torch
from torch import Tensor

from sparing.core.errors import ConfigError, check_range
from sparing.core.inner import Term, products
from sparing.core.keys import Ctx
from sparing.core.later import doubt
from sparing.core.parcel import Parcel, Schema, cleared
from sparing.core.protocols import Arrival, Blended, Codec, Report, Step, View, Weigh
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, prefixed, under

NOTE = "similarity"
PAUSE = ("pause", "next_pause")
"""For how many rounds the reference stays forgotten, and for how many the next time."""
COLDEST = {"weights": 0.02, "updates": 0.2}
"""Below this, exp((cos - 1) / T) of cosines as they occur is too small beside the weights' grid to be told apart."""


def alike(
    layout: Layout,
    home: frozenset[str] = frozenset(),
    q: float = 1.0,
    on: str = "weights",
    softmax: float | None = None,
    at: str = "server",
) -> Weigh:
    """Weights by the cosine of models with the server's, or of updates with last round's mean update."""
    check_range("fedsim.q", q, 0, 10)
    if softmax is not None:
        check_range(f"fedsim.softmax over {on}", softmax, COLDEST[on], math.inf)
    if on not in ("weights", "updates"):
        raise ConfigError(f"fedsim.on is {on!r}; use 'weights' or 'updates'")
    if at not in ("server", "client"):
        raise ConfigError(f"fedsim.at is {at!r}; use 'server' or 'client'")
    if (on, at) == ("updates", "client"):
        raise ConfigError("fedsim.on is 'updates', but fedsim.at is 'client', which has no last mean update; use one")
    params = [name for name in layout.params if name not in home]
    counts = sizes(layout, home)

    def init(model: Tree, clients: int) -> Tree:
        if on == "weights":
            return {}
        reference = {name: torch.zeros_like(model[name]) for name in params}
        device = next((x.device for x in reference.values()), None)
        return prefixed("reference", reference) | {x: torch.full((1,), i, device=device) for i, x in enumerate(PAUSE)}

    def of(state: Tree, arrival: Arrival) -> tuple[Tensor, dict[str, Tensor]]:
        if at == "client":
            cos_K = arrival.notes[NOTE].double().clamp(-1, 1)
        else:
            start = arrival.model if on == "weights" else {}
            found = {name: arrival.update[name] for name in params if name in arrival.update}
            reference = arrival.model if on == "weights" else under("reference", state)
            cos_K = cosine(found, start, reference, arrival.scope, arrival.ctx.ids)
        n_K = arrival.notes["n"].to(cos_K)
        if softmax is None and q in (0, 1):
            return cleared(cos_K, cos_K > 0) * (n_K if q else 1.0), {"cos": cos_K, "n": n_K}
        here = torch.stack([cos_K, n_K]).T.tolist()
        weights = [factor(cos, softmax) * n**q for cos, n in here]  # one by one: vectors round by place
        return torch.tensor(weights, dtype=torch.float64).to(cos_K.device, non_blocking=True), {"cos": cos_K, "n": n_K}

    def learn(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Report]:
        report, ids = dict(counts), blended.ids

        def judge(found: Tensor) -> None:
            cos, weight = found.tolist()
            for k in (k for k, x in enumerate(cos) if x != x):
                warnings.warn(
                    f"round {ctx.round}: client {int(ids[k])} has nothing but zeros to compare; left out", stacklevel=2
                )
            if on == "weights" and not any(weight):
                warnings.warn(
                    f"round {ctx.round}: nobody is similar to the server, so its model stays as it was; "
                    f"{'raise softmax' if softmax else 'lower local.lr'}",
                    stacklevel=2,
                )
            report.update(spread([x for x in cos if x == x]) | shares(weight))

        doubt(ctx.doubts, torch.stack([blended.seen["cos"], blended.weight]), judge)
        return (learned(state, blended, ctx, q, report) if state else {}), report

    def most(ctx: Ctx) -> float:
        return math.fsum(n**q for n in ctx.here[1].tolist())

    return Weigh(of, most, init, learn, name="fedsim")


def learned(state: Tree, blended: Blended, ctx: Ctx, q: float, report: Report) -> Tree:
    """The last mean update, or nothing while it is forgotten."""
    pause, coming = (state[name] for name in PAUSE)
    forgets = ~followed(blended, q) & (pause == 0)

    def judge(found: Tensor) -> None:
        report["reference_forgotten"] = float(found[0])
        if found[0]:
            warnings.warn(
                f"round {ctx.round}: most of the cohort is not similar to the last mean update, so the model stays as "
                f"it was and that update is forgotten: FedAvg's weights for {int(found[1])} rounds from here",
                stacklevel=2,
            )

    doubt(ctx.doubts, torch.cat([forgets.to(coming), coming]), judge)
    pause = torch.where(forgets, coming, (pause - 1).clamp(min=0))
    reference = {n: cleared(renewed(x, blended, n), pause == 0) for n, x in under("reference", state).items()}
    return prefixed("reference", reference) | dict(zip(PAUSE, (pause, coming * (1 + forgets)), strict=True))


def followed(blended: Blended, q: float) -> Tensor:
    """Whether those who count have more than half of the cohort's n_k^q."""
    n = blended.seen["n"].double() ** q
    return 2 * cleared(n, blended.weight > 0).sum() > n.sum()


def agreement(q: float) -> Step:
    """With `on: updates`: the model stays as it was where most of the cohort does not follow the reference."""

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {"n": arrival.notes["n"]}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        follows = followed(blended, q)
        return {name: cleared(x, follows) for name, x in blended.update.items()}, state, {}

    return Step(apply, watch=watch, name="agreement")


def renewed(x: Tensor, blended: Blended, name: str) -> Tensor:
    """The last mean update, entry by entry: where nobody voted, that of the round in which somebody last did."""
    if name not in blended.update:
        return x
    new, mask = blended.update[name].to(x.dtype), blended.covered[name]
    return new if mask is None else torch.where(mask, new, x)


def factor(cos: float, softmax: float | None) -> float:
    if cos != cos:
        return 0.0
    return max(cos, 0.0) if softmax is None else math.exp((cos - 1) / softmax)


def told(layout: Layout, home: frozenset[str] = frozenset()) -> Codec:
    """The client compares its model with what it was sent, and adds the cosine to its notes."""
    params = [name for name in layout.params if name not in home]

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        after = {name: view.after[name] for name in params if name in parcel.leaves}
        scope = {name: parcel.leaves[name].scope for name in after}
        cos_K = cosine(after, {}, view.start, scope, view.ctx.ids)
        return parcel._replace(notes=parcel.notes | {NOTE: cos_K.float()}), state

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        return expected._replace(notes=expected.notes | {NOTE: 1})

    return Codec(encode, schema=schema, name="fedsim")


def cosine(rows: Tree, start: Tree, reference: Tree, scope: dict[str, Tensor | None], ids: Tensor) -> Tensor:
    """cos(start + rows, reference) in scope, `[K]` float64: 1 if the reference is zero, else NaN for rows that are."""
    if not rows:
        return torch.ones(len(ids), dtype=torch.float64, device=ids.device)
    terms = [Term(x, start.get(name), reference[name], scope.get(name)) for name, x in rows.items()]
    aa, ab, bb = total(products(terms, len(ids)).flatten(0, 1)).view(3, -1)
    cos_K = (ab / (aa * bb).sqrt()).clamp(-1, 1)
    return cos_K.masked_fill(bb == 0, 1.0)


def sizes(layout: Layout, home: frozenset[str]) -> Report:
    personal = sum(math.prod(layout.shapes[name]) for name in layout.params if name in home)
    return {"shared_param_count": float(layout.size - personal), "personal_param_count": float(personal)}


def spread(cos: list[float]) -> Report:
    if not cos:
        return {}
    mean = math.fsum(cos) / len(cos)
    return {"avg_similarity": mean, "similarity_variance": math.fsum((x - mean) ** 2 for x in cos) / len(cos)}


def shares(weight: list[float]) -> Report:
    """Of the normalised weights; all zero where nobody counted."""
    whole = math.fsum(weight)
    share = [w / whole if whole else 0.0 for w in weight]
    entropy = math.fsum(-w * math.log(w) for w in share if w > 0)
    return {
        "max_weight": max(share),
        "min_weight": min(share),
        "weight_entropy": entropy,
        "similar_clients": float(sum(w > 0 for w in share)),
    }
