"""Stein-rule shrinkage on a GPU, all layers in two kernels, where no mask tells entries apart."""

import torch
from torch import Tensor

from sparing.accel.cuda import takes_kernels
from sparing.accel.rows import in_one_row
from sparing.core.context import Ctx
from sparing.core.method import Blended
from sparing.core.ops import constants
from sparing.core.reduce import DEPTH, LANES, dots
from sparing.core.tree import Tree
from sparing.parts.blend import stein
from sparing.parts.blend.stein import HIGH, LOW, NOTHING, TINY, SteinAim, SteinSettings

MOST = LANES * DEPTH
"""Clients whose numbers are one block of a sum."""


def fast_stein_coefficients(
    blended: Blended, aims: dict[str, SteinAim], state: Tree, ctx: Ctx, s: SteinSettings
) -> tuple[Tensor, Tensor]:
    """`stein.stein_coefficients`."""
    mass = _masses(state, list(aims), blended, s)
    if mass is None or len(blended.weight) > MOST:
        return stein.stein_coefficients.plain(blended, aims, state, ctx, s)
    from sparing.accel.cuda import shrink

    terms = stein.target_differences(blended.update, aims, dict.fromkeys(aims))
    sums = dots([term._replace(other=term.x) for term in terms], 1)
    sizes = constants(tuple(blended.update[name].numel() for name in aims), mass.device)
    numbers = (stein.sampling_factor(blended, ctx, s), NOTHING, LOW, HIGH)
    return shrink.measured_coefficients(
        ctx.placed(blended.weight), blended.seen["away"], sums, mass, sizes, state["rounds"], numbers
    )


def fast_stein_targets(state: Tree, which: dict[str, int], s: SteinSettings) -> dict[str, SteinAim]:
    """`stein.stein_targets`, of all layers in few operations."""
    known = [] if s.target != "ema" else [(name, i) for name, i in which.items() if s.betas[i] != 1]
    if not known or not state[f"sum{known[0][1]}/{known[0][0]}"].is_cuda:
        return stein.stein_targets.plain(state, which, s)
    found, masses = ([state[f"{kind}{i}/{name}"] for name, i in known] for kind in ("target", "mass"))
    there = (torch.cat([x.flatten() for x in masses]) > 0).split([x.numel() for x in masses])
    aims = [SteinAim(m, where.view_as(mass)) for m, where, mass in zip(found, there, masses, strict=True)]
    return dict.fromkeys(which, SteinAim()) | dict(zip((name for name, _ in known), aims, strict=True))


def fast_shrink_and_follow(
    state: Tree, names: list[str], blended: Blended, aims: dict[str, SteinAim], c: Tensor | None, s: SteinSettings
) -> tuple[Tree, Tree]:
    """`stein.shrink_and_follow`."""
    mass = _masses(state, names, blended, s)
    if mass is None:
        return stein.shrink_and_follow.plain(state, names, blended, aims, c, s)
    from sparing.accel.cuda import shrink

    update, beta = blended.update, s.betas[0]
    xs, old = [update[name] for name in names], [state[f"sum0/{name}"] for name in names]
    sizes, target = tuple(x.numel() for x in xs), in_one_row([aims[name].m for name in names])[0]  # pyright: ignore
    numbers = (beta, 1 - beta, TINY)
    out, many = shrink.shrunk_layers(in_one_row(xs)[0], target, in_one_row(old)[0], mass, c, sizes, numbers)
    new, sums, aimed = ([part.view_as(x) for part, x in zip(row.split(sizes), xs, strict=True)] for row in out[:3])
    before = [state[f"mass0/{name}"] for name in names]
    masses = [x.view_as(y) for x, y in zip(many.split(1), before, strict=True)]
    followed: Tree = {}
    for name, *moved in zip(names, sums, masses, aimed, strict=True):
        followed |= zip((f"{kind}0/{name}" for kind in ("sum", "mass", "target")), moved, strict=True)
    return update if c is None else update | dict(zip(names, new, strict=True)), followed


def _masses(state: Tree, names: list[str], blended: Blended, s: SteinSettings) -> Tensor | None:
    """The masses of all layers in a row, where kernels can take these at once."""
    one = s.target == "ema" and s.estimator == "consistent" and len(s.betas) == 1 and s.betas[0] != 1
    if not one or not names or blended.apart or any(blended.covered[name] is not None for name in names):
        return None
    masses = [state[f"mass0/{name}"] for name in names]
    fine = all(takes_kernels(blended.update[name]) for name in names) and all(x.numel() == 1 for x in masses)
    return in_one_row(masses)[0] if fine else None
