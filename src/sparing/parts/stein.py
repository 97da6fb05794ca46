# pyright: reportPrivateImportUsage=false
# torch._foreach_* are what torch.optim itself is written in, but carry no public name.
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
from sparing.core.gpu import brought, ready, stretched
from sparing.core.inner import Term, products
from sparing.core.keys import Ctx
from sparing.core.later import doubt
from sparing.core.parcel import both
from sparing.core.protocols import Arrival, Blended, Method, Report, Step
from sparing.core.reduce import DEPTH, LANES, total
from sparing.core.tree import Layout, Tree, abreast

log = logging.getLogger("sparing")
LOW, HIGH = 0.2, 1.0
TARGET_BETA = 0.9
"""How slowly the target follows where beta is used for the coefficient."""
GRID = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
MOST = LANES * DEPTH
"""Clients whose numbers are one block of a sum."""
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
    last: list[tuple[list, list, dict[str, Aim]]] = []
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

    def chosen(state: Tree, names: list[str]) -> dict[str, int]:
        """Which beta a layer goes by: the one that foretold best so far, the configured one while all are equal."""
        if not s.learn_beta or not names:
            return dict.fromkeys(names, 0)
        start = min(range(len(betas)), key=lambda i: abs(betas[i] - s.beta))
        misses = torch.cat([state[f"miss/{name}"] for name in names]).tolist()
        return {n: start if x[start] <= min(x) else x.index(min(x)) for n, x in zip(names, misses, strict=True)}

    def expected(state: Tree, which: dict[str, int]) -> dict[str, Aim]:
        """The targets by these betas. They are asked for twice a round, so the last are kept, with their sources."""
        known = [] if s.target != "ema" else [(name, i) for name, i in which.items() if betas[i] != 1]
        if not known:
            return {name: Aim() for name in which}
        sums, masses = ([state[f"{kind}{i}/{name}"] for name, i in known] for kind in ("sum", "mass"))
        key = [(name, i, *map(id, pair)) for (name, i), *pair in zip(known, sums, masses, strict=True)]
        kept = next(iter(last), None)  # other threads may put theirs in its place
        if kept is None or kept[0] != key:
            m = abreast(torch._foreach_div(sums, torch._foreach_clamp_min(masses, TINY)))
            sizes = [x.numel() for x in sums]
            there = (torch.cat([x.flatten() for x in masses]) > 0).split([x.numel() for x in masses])
            rows = zip(sums, masses, m.split(sizes, 1), (-m).split(sizes, 1), there, strict=True)
            aims = [Aim(m.view_as(x), where.view_as(mass), away.view_as(x)) for x, mass, m, away, where in rows]
            kept = key, [sums, masses], dict(zip((name for name, _ in known), aims, strict=True))
            last[:] = [kept]
        return {name: kept[2].get(name, Aim()) for name in which}

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        """For each layer, how far the clients are from m: |d_i - m|^2, `[K, layers]`."""
        names = [name for name in params if name in arrival.update]
        if not names or s.estimator == "literal":
            return {}
        aims = expected(state, chosen(state, names))
        inside = {name: both(by_entry(aims[name].there), arrival.scope[name]) for name in names}
        return {"away": products(apart(arrival.update, aims, inside), len(arrival.ctx.ids))[0]}

    def aim(state: Tree, which: dict[str, int], blended: Blended) -> dict[str, Aim]:
        """This round's targets, and where they and X are both defined."""
        aims = expected(state, which)
        if s.target == "uniform" and blended.plain:
            aims = {name: Aim(m := blended.plain[name], None, -m) for name in aims}
        return {name: aim._replace(there=both(aim.there, blended.covered[name])) for name, aim in aims.items()}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        caution(blended, ctx, s)
        names = [name for name in params if name in blended.update]
        which = chosen(state, names)
        aims = aim(state, which, blended)
        mass, c = together(state, names, blended), None
        after, update = dict(state), blended.update
        if names and ctx.round > s.warmup and len(blended.weight) >= 2:
            c, noise = measured(blended, aims, state, ctx, s, mass)
            if s.only < 1 or s.beta_role == "coefficient":
                pulled = strongest(noise, names, s.only)
                if s.beta_role == "coefficient":
                    smooth = torch.cat([state[f"smooth/{name}"] for name in names])
                    c = s.beta * smooth + (1 - s.beta) * c
                    now = torch.where(pulled, c, smooth).split(1)
                    after |= zip((f"smooth/{name}" for name in names), now, strict=True)
                c = c.masked_fill(~pulled, 1.0)
        if mass is not None:
            update = update | taken_in(after, names, update, aims, mass, c)
        else:
            update = update if c is None else update | shrunk(update, aims, c)
            follow(after, names, blended)
        after["rounds"] = state["rounds"] + 1
        c = torch.ones(len(names), dtype=torch.float64) if c is None else c
        report: Report = {}

        def judge(c: Tensor) -> None:
            report.update(zip((f"c/{name}" for name in names), c.tolist(), strict=True))
            if s.learn_beta:
                report.update({f"beta/{name}": betas[i] for name, i in which.items()})
            report.update(c_min=min(c.tolist(), default=1.0), c_max=max(c.tolist(), default=1.0))
            log.debug("Round %d: c_min=%.4f, c_max=%.4f", ctx.round, report["c_min"], report["c_max"])

        doubt(ctx.doubts, c, judge)
        return update, after, report

    def follow(state: Tree, names: list[str], blended: Blended) -> None:
        """The targets take in this round's X, after it was judged by them."""
        if s.learn_beta and names:
            # all but beta = 1 are defined at the same entries, and that one is charged there too
            known = expected(state, dict.fromkeys(names, 0))
            inside = {name: both(known[name].there, blended.covered[name]) for name in names}
            aims = [expected(state, dict.fromkeys(names, i)) for i in range(len(betas))]
            misses = torch.stack([products(apart(blended.update, some, inside), 1)[0, 0] for some in aims], dim=1)
            for name, miss in zip(names, misses, strict=True):
                state[f"miss/{name}"] = FORGET * state[f"miss/{name}"] + miss[None]
        for i, beta in enumerate(betas if s.target == "ema" and names else ()):
            sums, masses = ([state[f"{kind}{i}/{name}"] for name in names] for kind in ("sum", "mass"))
            new = torch._foreach_mul([blended.update[name] for name in names], 1 - beta)
            sums = torch._foreach_add(torch._foreach_mul(sums, beta), new)
            masses = torch._foreach_add(torch._foreach_mul(masses, beta), 1 - beta)
            for name, *moved in zip(names, sums, masses, strict=True):
                covered = blended.covered[name]
                for key, x in zip((f"sum{i}/{name}", f"mass{i}/{name}"), moved, strict=True):
                    state[key] = x if covered is None else torch.where(covered, x, state[key])

    def together(state: Tree, names: list[str], blended: Blended) -> Tensor | None:
        """The masses of all layers in a row, where kernels can take these at once: on a GPU, without masks."""
        one = s.target == "ema" and s.estimator == "consistent" and len(betas) == 1 and betas[0] != 1
        if not one or not names or blended.apart or any(blended.covered[name] is not None for name in names):
            return None
        masses = [state[f"mass0/{name}"] for name in names]
        fine = all(ready(blended.update[name]) for name in names) and all(x.numel() == 1 for x in masses)
        return abreast(masses)[0] if fine else None

    def taken_in(
        state: Tree, names: list[str], update: Tree, aims: dict[str, Aim], mass: Tensor, c: Tensor | None
    ) -> Tree:
        """`shrunk` and `follow` at once; the next round's targets come of it too."""
        from sparing.core.gpu.shrink import shrunk as at_once

        xs, old = [update[name] for name in names], [state[f"sum0/{name}"] for name in names]
        sizes, target = tuple(x.numel() for x in xs), abreast([aims[name].m for name in names])[0]  # pyright: ignore
        out, many = at_once(abreast(xs)[0], target, abreast(old)[0], mass, c, sizes, (betas[0], 1 - betas[0], TINY))
        new, sums, m, away = ([part.view_as(x) for part, x in zip(row.split(sizes), xs, strict=True)] for row in out)
        before = [state[f"mass0/{name}"] for name in names]
        masses, there = ([x.view_as(y) for x, y in zip(row.split(1), before, strict=True)] for row in (many, many > 0))
        state |= {f"sum0/{name}": x for name, x in zip(names, sums, strict=True)}
        state |= {f"mass0/{name}": x for name, x in zip(names, masses, strict=True)}
        key = [(name, 0, *map(id, pair)) for name, *pair in zip(names, sums, masses, strict=True)]
        last[:] = [(key, [sums, masses], {n: Aim(*aim) for n, *aim in zip(names, m, there, away, strict=True)})]
        return {} if c is None else dict(zip(names, new, strict=True))

    def check(method: Method) -> None:
        if [step.name for step in method.blend.steps].count("stein") > 1:
            raise MethodError("the update would be shrunk twice, by stein and by sr-fedavg; keep one of them")

    return Step(apply, init, watch, name="stein", needs_mean=True, plain=s.target == "uniform", check=check)


class Aim(NamedTuple):
    """A layer's target."""

    m: Tensor | None = None  # None: zero
    there: Tensor | None = None  # where it is defined: one boolean, or one an entry; None: everywhere
    away: Tensor | None = None  # -m


def apart(x: Tree, aims: dict[str, Aim], inside: dict[str, Tensor | None]) -> list[Term]:
    """x - m of every layer."""
    return [Term(x[name], aim.away, None, inside[name]) for name, aim in aims.items()]


def by_entry(there: Tensor | None) -> Tensor | None:
    """None also for one boolean: where that is false, p is 0, so nothing comes of the layer."""
    return None if there is None or there.numel() == 1 else there


def shrunk(update: Tree, aims: dict[str, Aim], c: Tensor) -> Tree:
    """m + c (X - m) of these layers, X itself where c is 1; all in one row, since every operation costs on a GPU."""
    xs = {name: update[name] for name in aims}
    sizes = [x.numel() for x in xs.values()]
    x = abreast(list(xs.values()))[0]
    m = abreast([torch.zeros_like(update[name]) if aim.m is None else aim.m for name, aim in aims.items()])[0]
    c = c[stretched(tuple(sizes), c.device)]
    pulled, inside = c != 1, {name: by_entry(aim.there) for name, aim in aims.items()}
    if any(mask is not None for mask in inside.values()):
        full = torch.ones((), dtype=torch.bool, device=x.device)
        every = [(full if mask is None else mask).expand_as(xs[name]) for name, mask in inside.items()]
        pulled &= torch.cat([mask.reshape(-1) for mask in every])
    parts = torch.where(pulled, m + c * (x - m), x).split(sizes)
    return {name: part.view_as(x) for (name, x), part in zip(xs.items(), parts, strict=True)}


def measured(
    blended: Blended, aims: dict[str, Aim], state: Tree, ctx: Ctx, s: Settings, mass: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every layer's c, and its noise p v / |X - m|^2, `[layers]`: 1 and NaN where c is not defined.

    Where there are masses in a row, a kernel does it.
    """
    inside = {name: by_entry(aim.there) for name, aim in aims.items()}
    terms = [term._replace(other=term.x) for term in apart(blended.update, aims, inside)]
    sums, away = products(terms, 1), blended.seen.get("away", blended.weight.new_empty(len(blended.weight), 0))
    f = 1 - len(blended.weight) / (ctx.clients - ctx.held) if s.population == "finite" else 1.0
    if mass is not None and len(blended.weight) <= MOST:
        from sparing.core.gpu import shrink

        sizes = brought(tuple(blended.update[name].numel() for name in aims), mass.device)
        return shrink.measured(blended.weight, away, sums, mass, sizes, state["rounds"], (f, NOTHING, LOW, HIGH))
    d, _, size = sums[:, 0]
    weight, p = blended.weight / blended.weight.sum(), entries(blended.update, aims, d)
    w2, q = total(torch.cat([weight.square()[None], (weight[:, None] * away).T])).split((1, away.shape[1]))
    known = (p > 2) & ~(d <= NOTHING * size) & (w2 < 1)
    if s.target == "ema":
        known &= state["rounds"] > 0
    if blended.apart:
        known &= brought(tuple(int(name not in blended.apart) for name in aims), d.device) > 0
    if s.estimator == "literal":
        c, noise = 1 - (p - 2) * (d / p) / d, torch.ones_like(d)
    else:
        q = q + (d - size) if s.target == "uniform" else q  # the clients were compared with zero
        noise = f * (w2 / (1 - w2)) * (q / d - 1).clamp(min=0.0)
        c = 1 - (p - 2) / p * noise
    return c.clamp(LOW, HIGH).masked_fill(~known, 1.0), noise.masked_fill(~known, math.nan)


def entries(update: Tree, aims: dict[str, Aim], like: Tensor) -> Tensor:
    """p: how many entries of each layer are compared, `[layers]` float64."""
    one = torch.ones_like(like[:1], dtype=torch.bool)
    masks = [one if aim.there is None else aim.there for aim in aims.values()]
    every = zip(aims, masks, strict=True)
    sizes = brought(tuple(update[name].numel() // max(mask.numel(), 1) for name, mask in every), like.device)
    if all(mask.numel() == 1 for mask in masks):
        return torch.cat([mask.reshape(1) for mask in masks]).to(like.dtype) * sizes
    return torch.stack([mask.sum(dtype=like.dtype) for mask in masks]) * sizes


def strongest(noise: Tensor, names: list[str], share: float) -> Tensor:
    """The layers whose updates are noisiest, so large a share of those that have a noise: bool `[layers]`."""
    known = ~noise.isnan()
    if share == 1:
        return known
    by_name = brought(tuple(sorted(range(len(names)), key=names.__getitem__)), noise.device)
    order = by_name[noise[by_name].nan_to_num(-1.0).argsort(descending=True, stable=True)]
    count = torch.ceil(share * known.sum().double())
    ranks = torch.arange(len(names), dtype=count.dtype, device=noise.device)
    return torch.zeros_like(known).index_put((order,), ranks < count)


def caution(blended: Blended, ctx: Ctx, s: Settings) -> None:
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
