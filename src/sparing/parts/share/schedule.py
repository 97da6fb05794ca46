"""Partial sharing (PSFed) over the rounds: how much is shared in which one, and rounds that share everything."""

import math
from collections.abc import Callable

import torch

from sparing.core.compose import share_everything
from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, check_range, nearest_name
from sparing.core.method import Blended, Report, Share
from sparing.core.parcel import Cut, Cuts
from sparing.core.tree import Layout, Tree

FAR = 1 << 40  # a round after every warm-up
RAMPS: dict[str, Callable[[float], float]] = {
    "linear": lambda s: s,
    "cosine": lambda s: (1 - math.cos(math.pi * s)) / 2,
    "step": lambda s: math.floor(s),
}


def shared_counts(
    d: int, fraction: float = 0.5, start: float | None = None, warmup: int = 0, schedule: str = "linear"
) -> Callable[[int], int]:
    """How many of d positions round t shares: round(p_t d), p_t going from `start` to `fraction` in `warmup` rounds.

    >>> [shared_counts(100, 0.5, start=0.1, warmup=4)(t) for t in (1, 2, 3, 4, 5, 6)]
    [10, 20, 30, 40, 50, 50]
    """
    check_range("psfed.fraction", fraction, 0, 1)
    if schedule not in RAMPS:
        raise ConfigError(f"psfed.schedule is {schedule!r}; {nearest_name(schedule, RAMPS)}")
    if warmup < 0 or (start is None) != (warmup == 0):
        raise ConfigError(
            f"psfed.start is {start} and psfed.warmup {warmup}; a warm-up needs both, such as start: 0.1, warmup: 10"
        )
    if start is None:
        return lambda t: math.floor(fraction * d + 0.5)
    check_range("psfed.start", start, 0, 1)

    def count(t: int) -> int:
        done = RAMPS[schedule](min(max(t - 1, 0) / warmup, 1.0))
        return math.floor((start * (1 - done) + fraction * done) * d + 0.5)

    return count


def partial_share(layout: Layout, part: Share, count: Callable[[int], int], sync: int | None = None) -> Share:
    """Share `part`; but everything in every `sync`-th round and where the count is d, and nothing where it is 0, but
    for the download of newcomers, unless it is 0 for good.

    If every round shares everything, clients keep nothing of their own; if none shares anything, all is private.
    """
    if sync is not None and sync < 1:
        raise ConfigError(f"psfed.sync is {sync}; it must be 1 or more: so many rounds from one full sync to the next")
    whole = share_everything(layout)
    nothing = Share(down=lambda state, model, ctx: {}, up=lambda got, ctx: {})
    never = sync is None and max(count(1), count(FAR)) == 0
    least, most = sorted((count(1), count(FAR)))
    own = part.own if least else frozenset(layout.shapes)
    if least == layout.size or sync == 1:
        own = frozenset()

    def full(t: int) -> bool:
        return count(t) == layout.size or (sync is not None and t % sync == 0)

    def now(t: int) -> Share:
        return whole if full(t) else nothing if never else part

    def idle(t: int) -> bool:
        return not full(t) and count(t) == 0

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        cuts = now(ctx.round).down(state, model, ctx)
        if not idle(ctx.round):
            return cuts
        new_K = ctx.placed(torch.zeros(1, dtype=torch.bool) if ctx.first is None else ctx.first)
        shapes = {name: layout.shapes[name] for name in layout.buffers if name in cuts}
        ends = {name: new_K.reshape(-1, *[1] * len(shape)) for name, shape in shapes.items()}
        return cuts | {name: Cut(ends[name].expand(-1, *shape)) for name, shape in shapes.items()}

    def up(got: Cuts, ctx: Ctx) -> Cuts:
        return {} if idle(ctx.round) else now(ctx.round).up(got, ctx)

    def learn(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Report]:
        state, report = part.learn(state, blended, ctx)
        return state, {**report, "mask_count": float(layout.size)} if full(ctx.round) else report

    private = own if most == 0 and sync is None else frozenset()
    return Share(down, up, part.init, learn, own, private, look=part.look, most=part.most, syncs=sync is not None)
