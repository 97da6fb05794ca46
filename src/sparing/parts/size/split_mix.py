"""A network split by width into narrow ones that train apart (Split-Mix); a client holds as many as it can afford.

The server's model is a `Mix`: every tensor holds those of all bases, `[bases, *shape]`. Which bases a client holds
follows from seed, round and id, so both ends know, and no index travels.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, MethodError, check_range
from sparing.core.keys import hashes
from sparing.core.method import Fit, Remembered, Resize
from sparing.core.tree import Layout, Tree, layout_of
from sparing.parts.size.capacity import by_capacity
from sparing.parts.size.mixture import Mix
from sparing.parts.size.widths import narrowed_model, narrower_layout

LEAST = 1e-4
"""No network is split into more than ten thousand."""


def bases_for_ratio(ratio: float) -> int:
    """How many networks of this width make up the full one.

    >>> bases_for_ratio(0.125), bases_for_ratio(0.333)
    (8, 3)
    """
    check_range("split-mix.ratio", ratio, LEAST, 1)
    bases = round(1 / ratio)
    if abs(1 / ratio - bases) > 0.01:
        raise ConfigError(
            f"split-mix.ratio is {ratio:g}, but a whole number of bases must make up the network; use 1/k, such as "
            f"{1 / bases:.4g}"
        )
    return bases


def split_by_width(model: nn.Module, bases: int, static: bool = False, seed: int = 0) -> nn.Module:
    """So many networks 1 / bases times as wide, each initialised anew as torch does it; one is the model itself."""
    if bases == 1:
        return model
    layout = layout_of(model, static)
    smaller = narrower_layout(layout, 1 / bases)
    refuse_more_than_units(layout, bases)
    thin = narrowed_model(model, layout, smaller, 1 / bases)
    for name in thin.state_dict():
        if name not in layout.shapes:
            raise MethodError(f"split-mix cannot split {name!r}: it is no tensor of floats that train; drop it")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Mix([_initialised_copy(thin) for _ in range(bases)])


def refuse_more_than_units(layout: Layout, bases: int) -> None:
    hidden = {name: layout.shapes[name][0] for name in [name for name in layout.shapes if name in layout.kinds][:-1]}
    widest = max(hidden, key=lambda name: hidden[name])
    if (units := hidden[widest]) < bases:
        raise MethodError(
            f"split-mix cannot make {bases} bases: the widest hidden layer, {widest.rpartition('.')[0]!r}, has {units} "
            f"units; use a ratio of {1 / units:.4g} or more"
        )


def _initialised_copy(net: nn.Module) -> nn.Module:
    """A copy with new weights and biases; norms and what else has one axis stay."""
    net = copy.deepcopy(net)
    for layer in net.modules():
        if isinstance(layer, _ConvNd | nn.Linear):
            layer.reset_parameters()
    return net


def bases_fit(layout: Layout) -> Fit:
    """Client models that mix all bases, or fewer, down to one: size i has i less than all.

    Which ones is drawn anew each round, but once and for all for clients that keep something of their own.
    """
    return _drawn_bases_fit(layout, held_bases)._replace(
        kept=_drawn_bases_fit(layout, lambda ctx, *sizes: held_bases(ctx._replace(round=0), *sizes))
    )


def held_bases(ctx: Ctx, bases: int, count: int) -> Tensor:
    """Which bases each client holds in this round: bool `[K, bases]`, `count` true in every row.

    The first goes by id through a list shuffled for the round, so that all bases are trained. Each time through, ids
    start one place later: those `bases` apart, which may all be of one size, differ too. The others are drawn.
    """
    order = hashes(ctx.common.keys("split-mix/first"), bases)[0].argsort()
    first = order[ctx.placed((ctx.ids + ctx.ids // bases) % bases)][:, None]
    rest = torch.arange(bases - 1, device=first.device)
    mask_K = torch.zeros(len(first), bases, dtype=torch.bool, device=first.device)
    mask_K.scatter_(1, rest + (rest >= first), ctx.choose("split-mix", bases - 1, count - 1))
    return mask_K.scatter_(1, first, torch.ones_like(mask_K[:, :1]))


def _drawn_bases_fit(layout: Layout, held: Callable[[Ctx, int, int], Tensor]) -> Fit:
    bases = layout.bases
    counts = range(bases, 0, -1)

    def shrink(state: Remembered, model: Tree, size: int, ctx: Ctx) -> Tree:
        if size == 0:
            return model
        places = held(ctx, bases, counts[size]).nonzero()[:, 1].reshape(-1, counts[size])
        rows = torch.arange(len(places), device=places.device)[:, None]
        return {name: x.expand(len(places), *x.shape[1:])[rows, places] for name, x in model.items()}

    def grow(resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, dict[str, Tensor | None]]:
        if size == 0:
            return resized, dict.fromkeys(resized)
        mask_K = held(ctx, bases, counts[size])
        full, covered = {}, {}
        for name, x in resized.items():
            full[name] = x.new_zeros(len(mask_K), bases, *x.shape[2:])
            full[name][mask_K] = x.expand(len(mask_K), *x.shape[1:]).flatten(0, 1)
            covered[name] = mask_K.reshape(*mask_K.shape, *[1] * (x.ndim - 2)).expand_as(full[name])
        return full, covered

    def module(model: nn.Module, size: int) -> nn.Module:
        assert isinstance(model, Mix)
        return model.first(counts[size]) if size else model

    layouts = tuple(_layout_of_fewer(layout, count) for count in counts)
    names = tuple(f"{count} of {bases} bases" for count in counts)
    ratios = [count / bases for count in counts]
    return Fit(by_capacity(ratios, "width"), layouts, Resize(shrink, grow), module, names, within=True)


def _layout_of_fewer(layout: Layout, count: int) -> Layout:
    """Of so many bases, without what methods put beside the network: they will do so again."""
    shapes = {name: (count, *shape[1:]) for name, shape in layout.shapes.items() if name not in layout.extra}
    dtypes = {name: layout.dtypes[name] for name in shapes}
    return Layout(shapes, dtypes, layout.buffers - layout.extra, bases=count)
