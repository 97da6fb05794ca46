"""Stein-rule shrinkage (SR-FedAvg): pull the averaged update of each layer towards what earlier rounds lead one to
expect, the more the less its clients agree.

    X = sum w_i d_i          s2 = [sum w_i |d_i - X|^2 / p] / (1 - sum w_i^2)         v = s2 f sum w_i^2
    c = clamp(1 - (p - 2) v / |X - m|^2, 0.2, 1)                                      g = m + c (X - m)

v is the variance of X: from the spread between clients, not from the coordinates that make up |X - m|^2, for which c
would be 2 / p whatever the data. One pass suffices, since sum w_i |d_i - X|^2 = sum w_i |d_i - m|^2 - |X - m|^2.
"""

import logging
import math
import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, MethodError, check_range, unsummable
from sparing.core.method import Arrival, Blended, Method, Report, Step, Summary
from sparing.core.operation import operation
from sparing.core.ops import constants
from sparing.core.parcel import both_masks
from sparing.core.reduce import Term, dots, total
from sparing.core.tree import Layout, Tree

log = logging.getLogger("sparing")
LOW, HIGH = 0.2, 1.0
TARGET_BETA = 0.9
"""How slowly the target follows where beta is used for the coefficient."""
GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
TINY = 1e-300
"""In place of a mass of zero, under a sum of zero."""
NOTHING = 1e-18
"""|X - m|^2 below this part of |X|^2 is rounding."""
FORGET = 0.9
"""How much of a beta's past errors still counts, a round later, when betas are learned."""
CHOICES = {
    "target": ("ema", "zero", "uniform"),
    "beta_role": ("target", "coefficient"),
    "estimator": ("consistent", "literal"),
    "population": ("finite", "infinite"),
}


class SteinSettings(NamedTuple):
    beta: float = 0.9
    warmup: int = 5
    target: str = "ema"
    beta_role: str = "target"
    estimator: str = "consistent"
    population: str = "finite"
    learn_beta: bool = False
    only: float = 1.0

    @property
    def betas(self) -> tuple[float, ...]:
        """How slowly the targets that are kept follow: one, unless the best is looked for."""
        if self.learn_beta:
            return GRID
        return (TARGET_BETA if self.beta_role == "coefficient" else self.beta,)


class SteinAim(NamedTuple):
    """A layer's target."""

    m: Tensor | None = None  # None: zero
    there: Tensor | None = None  # where it is defined: one boolean, or one an entry; None: everywhere


def stein_step(layout: Layout, settings: SteinSettings, summed: bool = False) -> Step:
    """Shrink every parameter tensor by its own c. During `warmup` rounds, and wherever c is not defined, X itself.

    `summed`: the server sees sums only, and clients tell |d_i|^2 in place of |d_i - m|^2.
    """
    _refuse_settings_of_stein(settings)
    s, params = settings, layout.floats
    if summed and s.target == "uniform":
        raise unsummable("stein's target: uniform is a second mean, which they do not give; use target: ema")

    def init(model: Tree, clients: int) -> Tree:
        return first_state({name: model[name] for name in params}, s)

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        """For each layer, how far the clients are from m: |d_i - m|^2, `[K, layers]`."""
        names = [name for name in params if name in arrival.update]
        if not names or s.estimator == "literal":
            return {}
        aims = stein_targets(state, best_betas(state, names, s), s)
        inside = {name: both_masks(_mask_by_entry(aims[name].there), arrival.scope[name]) for name in names}
        return {"away": dots(target_differences(arrival.update, aims, inside), len(arrival.ctx.ids))[0]}

    def watch_alone(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        """What a client can tell without m: |d_i|^2, `[K, layers]`, zero of layers that are not sent."""
        if s.estimator == "literal":
            return {}
        names = [name for name in params if name in arrival.update]
        square = torch.zeros(len(arrival.ctx.ids), len(params), dtype=torch.float64, device=arrival.ctx.device)
        if names:
            terms = [Term(arrival.update[name], mask=arrival.scope[name]) for name in names]
            square[:, [params.index(name) for name in names]] = dots(terms, len(arrival.ctx.ids))[0]
        return {"square": square}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        _warn_of_no_effect(blended, ctx, s)
        names = [name for name in params if name in blended.update]
        which = best_betas(state, names, s)
        aims = this_rounds_targets(state, which, blended, s)
        if summed and names and s.estimator != "literal":
            blended = _seen_from_target(blended, aims, [params.index(name) for name in names])
        c, after = None, {"rounds": state["rounds"] + 1}
        if names and ctx.round > s.warmup and len(blended.weight) >= 2:
            c, noise = stein_coefficients(blended, aims, state, ctx, s)
            c, smooth = _selected_coefficients(c, noise, state, names, s)
            after |= smooth
        update, followed = shrink_and_follow(state, names, blended, aims, c, s)
        return update, state | followed | after, _reported_coefficients(c, names, which, ctx, s)

    if summed:
        pooled = {} if s.estimator == "literal" else {"square": len(params)}
        return Step(apply, init, watch_alone, name="stein", needs_mean=True, pooled=pooled)
    return Step(apply, init, watch, name="stein", needs_mean=True, uniform=s.target == "uniform")


def _seen_from_target(blended: Blended, aims: dict[str, SteinAim], layers: list[int]) -> Blended:
    """With sum w_i |d_i - m|^2 = sum w_i |d_i|^2 - 2 m X + |m|^2 in place of single distances, weights adding up to 1.

    Where m is defined at some entries of a layer only, sums over all of it say nothing, and the layer stays as it is.
    """
    away = blended.seen["square"][:, layers].clone()
    for i, (name, aim) in enumerate(aims.items()):
        if aim.m is None:
            continue
        pair = dots([Term(aim.m, other=blended.update[name])], 1)
        away[:, i] += pair[0, 0, 0] - 2 * pair[1, 0, 0]
    partly = frozenset(name for name, aim in aims.items() if _mask_by_entry(aim.there) is not None)
    return blended._replace(seen={"away": away}, apart=blended.apart | partly)


def refuse_stein_twice(method: Method) -> None:
    if [step.name for step in method.blend.steps].count("stein") > 1:
        raise MethodError("the update would be shrunk twice, by stein and by sr-fedavg; keep one of them")


def first_state(model: Tree, s: SteinSettings) -> Tree:
    """Targets are kept with the sums of updates and the mass of their weights that they are the quotients of."""
    state: Tree = {"rounds": torch.zeros(1, dtype=torch.int64, device=next(iter(model.values())).device)}
    for name, x in model.items():
        x = x.double()
        if s.target == "ema":
            for i in range(len(s.betas)):
                state[f"sum{i}/{name}"] = state[f"target{i}/{name}"] = torch.zeros_like(x)
                state[f"mass{i}/{name}"] = x.new_zeros([1] * x.dim())  # one number, until masks tell entries apart
        if s.learn_beta:
            state[f"miss/{name}"] = x.new_zeros(1, len(s.betas))
        if s.beta_role == "coefficient":
            state[f"smooth/{name}"] = x.new_ones(1)
    return state


def best_betas(state: Tree, names: list[str], s: SteinSettings) -> dict[str, int]:
    """Which beta a layer goes by: the one that foretold best so far, the configured one while all are equal."""
    if not s.learn_beta or not names:
        return dict.fromkeys(names, 0)
    start = min(range(len(s.betas)), key=lambda i: abs(s.betas[i] - s.beta))
    misses = torch.cat([state[f"miss/{name}"] for name in names]).tolist()
    return {n: start if x[start] <= min(x) else x.index(min(x)) for n, x in zip(names, misses, strict=True)}


@operation
def stein_targets(state: Tree, which: dict[str, int], s: SteinSettings) -> dict[str, SteinAim]:
    """What earlier rounds lead one to expect, by these betas."""
    aims = {}
    for name, i in which.items():
        if s.target != "ema" or s.betas[i] == 1:
            aims[name] = SteinAim()
        else:
            aims[name] = SteinAim(state[f"target{i}/{name}"], state[f"mass{i}/{name}"] > 0)
    return aims


def this_rounds_targets(state: Tree, which: dict[str, int], blended: Blended, s: SteinSettings) -> dict[str, SteinAim]:
    """And where they and X are both defined."""
    aims = stein_targets(state, which, s)
    if s.target == "uniform" and blended.uniform:
        aims = {name: SteinAim(blended.uniform[name]) for name in aims}
    return {name: aim._replace(there=both_masks(aim.there, blended.covered[name])) for name, aim in aims.items()}


def target_differences(x: Tree, aims: dict[str, SteinAim], inside: dict[str, Tensor | None]) -> list[Term]:
    """x - m of every layer."""
    return [Term(x[name], minus=aim.m, mask=inside[name]) for name, aim in aims.items()]


def _mask_by_entry(there: Tensor | None) -> Tensor | None:
    """None also for one boolean: where that is false, p is 0, so nothing comes of the layer."""
    return None if there is None or there.numel() == 1 else there


@operation
def stein_coefficients(
    blended: Blended, aims: dict[str, SteinAim], state: Tree, ctx: Ctx, s: SteinSettings
) -> tuple[Tensor, Tensor]:
    """Every layer's c, and its noise p v / |X - m|^2, `[layers]`: 1 and NaN where c is not defined."""
    inside = {name: _mask_by_entry(aim.there) for name, aim in aims.items()}
    terms = [term._replace(other=term.x) for term in target_differences(blended.update, aims, inside)]
    d, _, size = dots(terms, 1)[:, 0]
    away = blended.seen.get("away", d.new_empty(len(blended.weight), 0))
    weight, p = ctx.placed(blended.weight / blended.weight.sum()), entries_compared(blended.update, aims, d)
    w2, q = total(torch.cat([weight.square()[None], (weight[:, None] * away).T])).split((1, away.shape[1]))
    known = (p > 2) & ~(d <= NOTHING * size) & (w2 < 1)
    if s.target == "ema":
        known &= state["rounds"] > 0
    if blended.apart:
        known &= constants(tuple(int(name not in blended.apart) for name in aims), d.device) > 0
    if s.estimator == "literal":
        c, noise = 1 - (p - 2) * (d / p) / d, torch.ones_like(d)
    else:
        q = q + (d - size) if s.target == "uniform" else q  # the clients were compared with zero
        noise = sampling_factor(blended, ctx, s) * (w2 / (1 - w2)) * (q / d - 1).clamp(min=0.0)
        c = 1 - (p - 2) / p * noise
    return c.clamp(LOW, HIGH).masked_fill(~known, 1.0), noise.masked_fill(~known, math.nan)


def sampling_factor(blended: Blended, ctx: Ctx, s: SteinSettings) -> float:
    """f: the part of a mean's variance that is left, once so many of all clients are in it."""
    return 1 - len(blended.weight) / (ctx.clients - ctx.held) if s.population == "finite" else 1.0


def entries_compared(update: Tree, aims: dict[str, SteinAim], like: Tensor) -> Tensor:
    """p: how many entries of each layer are compared, `[layers]` float64."""
    counts = []
    for name, aim in aims.items():
        there = torch.ones_like(like[:1], dtype=torch.bool) if aim.there is None else aim.there
        counts.append(there.sum(dtype=like.dtype) * (update[name].numel() // max(there.numel(), 1)))
    return torch.stack(counts)


def _selected_coefficients(
    c: Tensor, noise: Tensor, state: Tree, names: list[str], s: SteinSettings
) -> tuple[Tensor, Tree]:
    """c where only the noisiest layers are shrunk, or where it is smoothed over rounds; and what is kept of that."""
    if s.only == 1 and s.beta_role != "coefficient":
        return c, {}
    pulled, smooth = _noisiest_layers(noise, names, s.only), {}
    if s.beta_role == "coefficient":
        before = torch.cat([state[f"smooth/{name}"] for name in names])
        c = s.beta * before + (1 - s.beta) * c
        now = torch.where(pulled, c, before).split(1)
        smooth = {f"smooth/{name}": x for name, x in zip(names, now, strict=True)}
    return c.masked_fill(~pulled, 1.0), smooth


@operation
def shrink_and_follow(
    state: Tree, names: list[str], blended: Blended, aims: dict[str, SteinAim], c: Tensor | None, s: SteinSettings
) -> tuple[Tree, Tree]:
    """The update, shrunk where there is a c; and the targets after they took in this round's X."""
    update = blended.update
    if c is not None:
        update = update | {name: _shrunk_layer(update[name], aims[name], c[i]) for i, name in enumerate(names)}
    return update, _follow_targets(state, names, blended, s)


def _shrunk_layer(x: Tensor, aim: SteinAim, c: Tensor) -> Tensor:
    """m + c (X - m), X itself where c is 1."""
    m = torch.zeros_like(x) if aim.m is None else aim.m
    inside = _mask_by_entry(aim.there)
    pulled = c != 1 if inside is None else (c != 1) & inside
    return torch.where(pulled, m + c * (x - m), x)


def _follow_targets(state: Tree, names: list[str], blended: Blended, s: SteinSettings) -> Tree:
    """The targets take in this round's X, after it was judged by them."""
    moved: Tree = {}
    if s.learn_beta and names:
        # all but beta = 1 are defined at the same entries, and that one is charged there too
        known = stein_targets(state, dict.fromkeys(names, 0), s)
        inside = {name: both_masks(known[name].there, blended.covered[name]) for name in names}
        aims = [stein_targets(state, dict.fromkeys(names, i), s) for i in range(len(s.betas))]
        misses = torch.stack([dots(target_differences(blended.update, some, inside), 1)[0, 0] for some in aims], dim=1)
        for name, miss in zip(names, misses, strict=True):
            moved[f"miss/{name}"] = FORGET * state[f"miss/{name}"] + miss[None]
    for i, beta in enumerate(s.betas if s.target == "ema" else ()):
        for name in names:
            taken = {"sum": (1 - beta) * blended.update[name], "mass": 1 - beta}
            for kind, x in taken.items():
                key = f"{kind}{i}/{name}"
                new, covered = beta * state[key] + x, blended.covered[name]
                moved[key] = new if covered is None else torch.where(covered, new, state[key])
            moved[f"target{i}/{name}"] = moved[f"sum{i}/{name}"] / moved[f"mass{i}/{name}"].clamp_min(TINY)
    return moved


def _reported_coefficients(
    c: Tensor | None, names: list[str], which: dict[str, int], ctx: Ctx, s: SteinSettings
) -> Report:
    def numbers(c: Tensor) -> dict[str, float]:
        found = dict(zip((f"c/{name}" for name in names), c.tolist(), strict=True))
        least, most = min(c.tolist(), default=1.0), max(c.tolist(), default=1.0)
        log.debug("Round %d: c_min=%.4f, c_max=%.4f", ctx.round, least, most)
        betas = {f"beta/{name}": s.betas[i] for name, i in which.items()} if s.learn_beta else {}
        return found | betas | {"c_min": least, "c_max": most}

    return Summary([torch.ones(len(names), dtype=torch.float64) if c is None else c], numbers)


def _noisiest_layers(noise: Tensor, names: list[str], share: float) -> Tensor:
    """The layers whose updates are noisiest, so large a share of those that have a noise: bool `[layers]`."""
    known = ~noise.isnan()
    if share == 1:
        return known
    by_name = constants(tuple(sorted(range(len(names)), key=names.__getitem__)), noise.device)
    order = by_name[noise[by_name].nan_to_num(-1.0).argsort(descending=True, stable=True)]
    count = torch.ceil(share * known.sum().double())
    ranks = torch.arange(len(names), dtype=count.dtype, device=noise.device)
    return torch.zeros_like(known).index_put((order,), ranks < count)


def _warn_of_no_effect(blended: Blended, ctx: Ctx, s: SteinSettings) -> None:
    if ctx.round > 1 or s.estimator == "literal":
        return
    if blended.apart:
        warnings.warn(
            f"stein: clients vote on different coordinates of layers such as {min(blended.apart)!r}, which are left "
            "as they are; use masks common to all clients",
            stacklevel=2,
        )
    if ctx.cohort < 2:
        warnings.warn(
            "stein: one client a round has no spread to learn from, so this is FedAvg; raise sample", stacklevel=2
        )
    elif ctx.cohort >= ctx.clients - ctx.held and s.population == "finite":
        warnings.warn(
            "stein: all clients take part, so the mean has no sampling error and c is 1: this is FedAvg; lower sample, "
            "or set population: infinite",
            stacklevel=2,
        )


def _refuse_settings_of_stein(s: SteinSettings) -> None:
    check_range("stein.beta", s.beta, 0, 1)
    check_range("stein.warmup", s.warmup, 0, math.inf)
    check_range("stein.only", s.only, 0, 1, open_low=True)
    for name, allowed in CHOICES.items():
        value = getattr(s, name)
        if value not in allowed:
            raise ConfigError(f"stein.{name} is {value!r}; use one of {', '.join(map(repr, allowed))}")
    if s.learn_beta and (s.target != "ema" or s.beta_role != "target"):
        raise ConfigError("stein.learn_beta chooses how the ema target follows; use target: ema and beta_role: target")
