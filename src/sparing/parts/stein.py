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

from sparing.core.errors import ConfigError, MethodError, check_range
from sparing.core.keys import Ctx
from sparing.core.parcel import both, cleared
from sparing.core.protocols import Arrival, Blended, Method, Report, Step
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree

log = logging.getLogger("sparing")
LOW, HIGH = 0.2, 1.0
TARGET_BETA = 0.9
"""How slowly the target follows where beta is used for the coefficient."""
GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
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


class Settings(NamedTuple):
    beta: float = 0.9
    warmup: int = 5
    target: str = "ema"
    beta_role: str = "target"
    estimator: str = "consistent"
    population: str = "finite"
    learn_beta: bool = False
    only: float = 1.0


def stein(layout: Layout, settings: Settings) -> Step:
    """Shrink every parameter tensor by its own c. During `warmup` rounds, and wherever c is not defined, X itself."""
    refuse(settings)
    s, params = settings, layout.floats
    betas = GRID if s.learn_beta else (TARGET_BETA if s.beta_role == "coefficient" else s.beta,)

    def init(model: Tree, clients: int) -> Tree:
        state: Tree = {"rounds": torch.zeros(1, dtype=torch.int64, device=next(iter(model.values())).device)}
        for name in params:
            x = model[name].double()
            if s.target == "ema":
                for i in range(len(betas)):
                    state[f"sum{i}/{name}"] = torch.zeros_like(x)
                    state[f"mass{i}/{name}"] = x.new_zeros([1] * x.dim())  # one number, until masks tell entries apart
            if s.learn_beta:
                state[f"miss/{name}"] = x.new_zeros(1, len(betas))
            if s.beta_role == "coefficient":
                state[f"smooth/{name}"] = x.new_ones(1)
        return state

    def chosen(state: Tree, name: str) -> int:
        """Which beta this layer goes by: the one that foretold best so far, the configured one while all are equal."""
        if not s.learn_beta:
            return 0
        miss = state[f"miss/{name}"][0]
        start = min(range(len(betas)), key=lambda i: abs(betas[i] - s.beta))
        return start if float(miss[start]) <= float(miss.min()) else int(miss.argmin())

    def expected(state: Tree, name: str, i: int) -> tuple[Tensor | float, Tensor | None]:
        """m, and where it is defined (None: everywhere)."""
        if s.target == "zero" or betas[i] == 1:
            return 0.0, None
        mass = state[f"mass{i}/{name}"]
        return state[f"sum{i}/{name}"] / mass.masked_fill(mass == 0, 1.0), mass > 0

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        """For each layer, how far the clients are from m: |d_i - m|^2 / p, `[K]`."""
        seen: dict[str, Tensor] = {}
        for name in params:
            if name not in arrival.update or s.estimator == "literal":
                continue
            m, defined = (0.0, None) if s.target == "uniform" else expected(state, name, chosen(state, name))
            away = arrival.update[name].double() - m
            inside = both(defined, arrival.scope[name])
            away = cleared(away, inside)
            count = away[0].numel() if inside is None else total(inside.expand_as(away)).clamp(min=1)
            seen[name] = total(away.square()) / count
        return seen

    def aim(state: Tree, name: str, blended: Blended) -> tuple[Tensor | float, Tensor | None]:
        """This round's target of one layer, and where it and X are both defined."""
        m, defined = (0.0, None) if s.target == "uniform" else expected(state, name, chosen(state, name))
        if s.target == "uniform" and blended.plain:
            m = blended.plain[name]
        return m, both(defined, blended.covered[name])

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        doubt(blended, ctx, s)
        names = [name for name in params if name in blended.update]
        weight = blended.weight / blended.weight.sum()
        ready = ctx.round > s.warmup and len(weight) >= 2 and (s.target != "ema" or int(state["rounds"]) > 0)
        pulls = {name: pull(blended, name, *aim(state, name, blended), weight, ctx, s) for name in names if ready}
        strong = strongest({name: noise for name, (c, noise) in pulls.items() if c is not None}, s.only)
        update, after, report = dict(blended.update), dict(state), {}
        for name in names:
            c = pulls[name][0] if name in strong else None
            if s.beta_role == "coefficient" and c is not None:
                after[f"smooth/{name}"] = s.beta * state[f"smooth/{name}"] + (1 - s.beta) * c
                c = float(after[f"smooth/{name}"])
            c = 1.0 if c is None else c
            if c != 1:
                update[name] = shrunk(blended.update[name], *aim(state, name, blended), c)
            follow(after, name, blended)
            report[f"c/{name}"] = c
            if s.learn_beta:
                report[f"beta/{name}"] = betas[chosen(state, name)]
        after["rounds"] = state["rounds"] + 1
        values = [report[f"c/{name}"] for name in names] or [1.0]
        report |= {"c_min": min(values), "c_max": max(values)}
        log.debug("Round %d: c_min=%.4f, c_max=%.4f", ctx.round, report["c_min"], report["c_max"])
        return update, after, report

    def follow(state: Tree, name: str, blended: Blended) -> None:
        """The targets take in this round's X, after it was judged by them."""
        x, covered = blended.update[name], blended.covered[name]
        if s.learn_beta:
            errors = []
            known = expected(state, name, 0)[1]  # the same for all but beta = 1, which is charged there too
            for i in range(len(betas)):
                m, _ = expected(state, name, i)
                errors.append(total(cleared(x - m, both(known, covered)).square())[0])
            state[f"miss/{name}"] = FORGET * state[f"miss/{name}"] + torch.stack(errors)[None]
        for i, beta in enumerate(betas if s.target == "ema" else ()):
            for key, new in ((f"sum{i}/{name}", x), (f"mass{i}/{name}", torch.ones_like(state[f"mass{i}/{name}"]))):
                moved = beta * state[key] + (1 - beta) * new
                state[key] = moved if covered is None else torch.where(covered, moved, state[key])

    def check(method: Method) -> None:
        if [step.name for step in method.blend.steps].count("stein") > 1:
            raise MethodError("the update would be shrunk twice, by stein and by sr-fedavg; keep one of them")

    return Step(apply, init, watch, name="stein", needs_mean=True, plain=s.target == "uniform", check=check)


def shrunk(x: Tensor, m: Tensor | float, inside: Tensor | None, c: float) -> Tensor:
    g = m + c * (x - m)
    return g if inside is None else torch.where(inside, g, x)


def pull(
    blended: Blended, name: str, m: Tensor | float, inside: Tensor | None, weight: Tensor, ctx: Ctx, s: Settings
) -> tuple[float | None, float]:
    """(c, p v / D) of one layer; None where c is not defined, as where clients voted on different coordinates."""
    away = cleared(blended.update[name] - m, inside)
    p = away.numel() if inside is None else int(inside.expand_as(away).sum())
    d, w2 = float(total(away.square())), float(weight.square().sum())
    if p <= 2 or d <= NOTHING * float(total(blended.update[name].square())) or w2 >= 1 or name in blended.apart:
        return None, 0.0
    if s.estimator == "literal":
        return clamped(1 - (p - 2) * (d / p) / d), 1.0
    q = p * float((weight * blended.seen[name]).sum())
    if s.target == "uniform":
        q += float(total(cleared(m * (m - 2 * blended.update[name]), inside)))
    f = 1 - len(weight) / (ctx.clients - ctx.held) if s.population == "finite" else 1.0
    noise = f * (w2 / (1 - w2)) * max(q / d - 1, 0.0)
    return clamped(1 - (p - 2) / p * noise), noise


def clamped(c: float) -> float:
    return min(max(c, LOW), HIGH)


def strongest(noise: dict[str, float], share: float) -> frozenset[str]:
    """The layers whose updates are noisiest, so large a share of them."""
    count = math.ceil(share * len(noise))
    return frozenset(sorted(noise, key=lambda name: (-noise[name], name))[:count])


def doubt(blended: Blended, ctx: Ctx, s: Settings) -> None:
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


def refuse(s: Settings) -> None:
    check_range("stein.beta", s.beta, 0, 1)
    check_range("stein.warmup", s.warmup, 0, math.inf)
    check_range("stein.only", s.only, 0, 1, open_low=True)
    for name, allowed in CHOICES.items():
        value = getattr(s, name)
        if value not in allowed:
            raise ConfigError(f"stein.{name} is {value!r}; use one of {', '.join(map(repr, allowed))}")
    if s.learn_beta and (s.target != "ema" or s.beta_role != "target"):
        raise ConfigError("stein.learn_beta chooses how the ema target follows; use target: ema and beta_role: target")
