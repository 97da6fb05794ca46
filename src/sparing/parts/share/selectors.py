"""Which positions a round shares (PSFed): a mask over all d parameters, cut into one per tensor.

random     a fresh draw each round
fixed      one draw for the whole run
layers     whole layers, taking turns
magnitude  the largest weights of the server's model
gradient   the largest recent updates of it, or gradients on a probe set, and some positions at random

The first three follow from seed and round, so both ends rebuild them and they cost no bytes. The others are chosen from
what only the server knows: their index travels down, and is known on the way up.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, check_range, nearest_name
from sparing.core.method import Blended, Report, Share, nothing
from sparing.core.operation import operation
from sparing.core.parcel import Cut, Cuts
from sparing.core.round import voted_count
from sparing.core.tree import Layout, Tree, flat, prefixed, under
from sparing.parts.share.schedule import FAR

DECAY = 0.9  # of a score, for every round that its position is not updated
JOINS = {"union": torch.logical_or, "intersection": torch.logical_and}
Count = Callable[[int], int]  # round -> positions to share


class Selector(NamedTuple):
    """A rule that gives the mask of a round."""

    pick: Callable[[Tree, Tree, Ctx], Tensor]  # (state, server's model, ctx) -> bool [K or 1, d]
    told: bool = False  # chosen from values
    exact: bool = True  # exactly as many positions as asked for
    init: Callable[[Tree], Tree] = nothing  # model -> state
    learn: Callable[[Tree, Blended], Tree] = lambda state, blended: state
    look: Callable[[Tree, Tree], Tree] = lambda state, gradient: state


def random_selector(layout: Layout, count: Count, per_client: bool, explore: float) -> Selector:
    return Selector(
        lambda state, model, ctx: _keyed_rows(ctx, per_client).choose("psfed", layout.size, count(ctx.round))
    )


def fixed_selector(layout: Layout, count: Count, per_client: bool, explore: float) -> Selector:
    def pick(state: Tree, model: Tree, ctx: Ctx) -> Tensor:
        always = _keyed_rows(ctx, per_client)._replace(round=0)
        return always.choose("psfed/fixed", layout.size, count(ctx.round))

    return Selector(pick)


def layers_selector(layout: Layout, count: Count, per_client: bool, explore: float) -> Selector:
    """Every round goes on from the layer where the last one stopped; with `per_client`, client i began at layer i."""
    modules = itertools.groupby(layout.params, key=lambda name: name.rpartition(".")[0])
    size = [sum(math.prod(layout.shapes[name]) for name in names) for _, names in modules]

    def turn(first: int, t: int) -> list[int]:
        """The layers of round t: those after the last round's, at least one, as near to the count as they come."""
        at, taken = first, []
        for s in range(1, t + 1):
            taken, so_far = [], 0
            for i in range(len(size) if count(s) else 0):
                layer = (at + i) % len(size)
                if taken and abs(so_far + size[layer] - count(s)) >= abs(so_far - count(s)):
                    break
                taken.append(layer)
                so_far += size[layer]
            at += len(taken)
        return taken

    def pick(state: Tree, model: Tree, ctx: Ctx) -> Tensor:
        who = (ctx.ids % max(1, len(size))).tolist() if per_client else [0]
        chosen = torch.zeros(len(who), len(size), dtype=torch.bool)
        for k, first in enumerate(who):
            chosen[k, turn(first, ctx.round)] = True
        return ctx.placed(chosen.repeat_interleave(torch.tensor(size), dim=1))

    return Selector(pick, exact=False)


def magnitude_selector(layout: Layout, count: Count, per_client: bool, explore: float) -> Selector:
    def pick(state: Tree, model: Tree, ctx: Ctx) -> Tensor:
        return _top_scores(_joined_parameters(model, layout).abs(), count(ctx.round), ctx)

    return Selector(pick, told=True)


def gradient_selector(layout: Layout, count: Count, per_client: bool, explore: float) -> Selector:
    """The score of a position is |its last aggregated update| * 0.9^(rounds since). Before there is any: at random."""

    def pick(state: Tree, model: Tree, ctx: Ctx) -> Tensor:
        fresh = math.floor(explore * count(ctx.round) + 0.5)
        best = _top_scores(_joined_parameters(state, layout), count(ctx.round) - fresh, ctx)
        left = layout.size - count(ctx.round) + fresh
        more = _keyed_rows(ctx, per_client).choose("psfed/explore", left, fresh)
        mask = best.repeat(len(more), 1)
        mask[~mask] = more.flatten()
        return mask

    def init(model: Tree) -> Tree:
        return {name: torch.zeros_like(model[name], dtype=torch.float32) for name in layout.params}

    def learn(state: Tree, blended: Blended) -> Tree:
        score = {name: x * DECAY for name, x in state.items()}
        for name in score.keys() & blended.update.keys():
            size, covered = blended.update[name].abs().float(), blended.covered[name]
            score[name] = size if covered is None else torch.where(covered, size, score[name])
        return score

    return Selector(pick, told=True, init=init, learn=learn)


def probed_selector(layout: Layout, count: Count, per_client: bool, explore: float) -> Selector:
    """Its score is the size of the loss's gradient on the server's probe set, at the model to be sent."""

    def look(state: Tree, gradient: Tree) -> Tree:
        return {name: gradient[name].abs().float() for name in state}

    return gradient_selector(layout, count, per_client, explore)._replace(learn=lambda state, blended: state, look=look)


SOURCES = {"updates": gradient_selector, "probe": probed_selector}
SELECTORS = {
    "random": random_selector,
    "magnitude": magnitude_selector,
    "gradient": gradient_selector,
    "layers": layers_selector,
    "fixed": fixed_selector,
}


def _join_selectors(how: str, a: Selector, b: Selector) -> Selector:
    """Positions that either (union) or both (intersection) select."""
    return Selector(
        lambda state, model, ctx: JOINS[how](
            a.pick(under("a", state), model, ctx), b.pick(under("b", state), model, ctx)
        ),
        told=a.told or b.told,
        exact=False,
        init=lambda model: prefixed("a", a.init(model)) | prefixed("b", b.init(model)),
        learn=lambda state, blended: (
            prefixed("a", a.learn(under("a", state), blended)) | prefixed("b", b.learn(under("b", state), blended))
        ),
        look=lambda state, gradient: (
            prefixed("a", a.look(under("a", state), gradient)) | prefixed("b", b.look(under("b", state), gradient))
        ),
    )


def selector_of(
    spec: str | dict[str, list[str]],
    layout: Layout,
    count: Count,
    per_client: bool,
    explore: float,
    source: str = "updates",
) -> Selector:
    """From what a study says: a name, or {union: [random, magnitude]}."""
    check_range("psfed.explore", explore, 0, 1)
    how, names = ("", [spec]) if isinstance(spec, str) else next(iter(spec.items()), ("", []))
    if not isinstance(spec, str) and (len(spec) != 1 or how not in JOINS or len(set(names)) < 2):
        raise ConfigError(
            f"psfed.selector is {spec!r}; write a name, or {{union: [a, b]}} or {{intersection: [a, b]}} of two names"
        )
    for name in names:
        if name not in SELECTORS:
            raise ConfigError(f"psfed.selector: nothing is called {name!r}; {nearest_name(str(name), SELECTORS)}")
    if per_client and set(names) == {"magnitude"}:
        raise ConfigError("psfed.per_client: magnitude selects the same positions for every client; drop per_client")
    if source not in SOURCES:
        raise ConfigError(f"psfed.source is {source!r}; {nearest_name(source, SOURCES)}")
    if source != "updates" and "gradient" not in names:
        raise ConfigError(f"psfed.source is {source!r}, but only selector: gradient has scores; set it, or drop source")
    known = SELECTORS | {"gradient": SOURCES[source]}
    made = [known[name](layout, count, per_client, explore) for name in names]
    return functools.reduce(lambda a, b: _join_selectors(how, a, b), made)


def selected_share(
    layout: Layout, select: Selector, count: Count, per_client: bool = False, first: str | None = None
) -> Share:
    """The selected part of the parameters, each way, and whole buffers.

    A client the server never met gets the whole model once (`first="download"`), or starts from the common initial
    model (`first="seed"`). A newcomer that was sent everything could not tell which part was selected from values, so
    where the index travels it is always the latter.
    """
    if first not in (None, "download", "seed"):
        raise ConfigError(f"psfed.first is {first!r}; use 'download' (the whole model at first contact) or 'seed'")
    if select.told and first == "download":
        raise ConfigError(
            "psfed.first is 'download', but a client that is sent everything cannot tell which part was selected from "
            "values; use first: seed, and sync: N if newcomers should catch up"
        )
    whole: Cuts = {name: Cut() for name in layout.shapes}
    mine = object()  # masks of another share are others

    def drawn(state: Tree, model: Tree, ctx: Ctx) -> tuple[Tensor, Cuts]:
        """This round's mask, whole and cut. One that follows from the round alone is drawn once in it."""

        def draw() -> tuple[Tensor, Cuts]:
            mask = select.pick(state, model, ctx)
            return mask, whole | _cut_by_tensor(mask, layout, select.told)

        who = tuple(ctx.ids.tolist()) if per_client else ()
        return draw() if select.told else ctx.once((mine, who), draw)

    def newcomers(ctx: Ctx) -> Tensor | None:
        """Who they are, if there are some."""
        some = ctx.first is not None and first != "seed" and not select.told and bool(ctx.first.any())
        return ctx.placed(ctx.first) if some and ctx.first is not None else None

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        (mask, cuts), new_K = drawn(state, model, ctx), newcomers(ctx)
        return cuts if new_K is None else whole | _cut_by_tensor(mask | new_K[:, None], layout)

    def up(got: Cuts, ctx: Ctx) -> Cuts:
        if not select.told:
            return drawn({}, {}, ctx)[1]
        return whole | {name: Cut(cut.mask) for name, cut in got.items()}

    def learn(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Report]:
        if select.exact:
            size = float(count(ctx.round))
        elif not select.told:
            size = select.pick({}, {}, ctx.at(slice(0, 1))).sum()
        else:
            size = voted_count(blended.update, blended.covered, layout)
        return select.learn(state, blended), {"mask_count": size}

    most = max(count(1), count(FAR)) if select.exact else None  # counts go from the one to the other
    return Share(down, up, select.init, learn, own=frozenset(layout.params), look=select.look, most=most)


def _keyed_rows(ctx: Ctx, per_client: bool) -> Ctx:
    return ctx if per_client else ctx.common


def _joined_parameters(tree: Tree, layout: Layout) -> Tensor:
    """All parameters in a row, `[K or 1, d]`."""
    parts = [flat(tree[name]) for name in layout.params]
    most = max(len(part) for part in parts)
    return torch.cat([part.expand(most, -1) for part in parts], dim=1)


def _cut_by_tensor(mask: Tensor, layout: Layout, told: bool = False) -> Cuts:
    """A mask over all parameters, `[K, d]`, cut into one per tensor."""
    shapes = {name: layout.shapes[name] for name in layout.params}
    rows, parts = mask.shape[0], mask.split([math.prod(shape) for shape in shapes.values()], dim=1)
    return {
        name: Cut(part.reshape(rows, *shape), told) for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }


def _top_scores(score: Tensor, k: int, ctx: Ctx) -> Tensor:
    """The k largest of every row: bool `[K, d]`. Among equals a draw decides, so that none is always passed over."""
    if k == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    cut = kth_largest(score, k)
    mask = score > cut
    for row, tied in zip(mask, score == cut, strict=True):
        equals = tied.nonzero()[:, 0]
        row[equals] = ctx.common.choose("psfed/ties", len(equals), k - int(row.sum()))[0]
    return mask


@operation
def kth_largest(score: Tensor, k: int) -> Tensor:
    """The k-th largest of every row, `[K, 1]`."""
    return score.kthvalue(score.shape[1] - k + 1, dim=1, keepdim=True).values
