"""A network split by width into narrow ones that train apart (Split-Mix); a client holds as many as it can afford.

The server's model is a `Mix`: every tensor holds those of all bases, `[bases, *shape]`. Which bases a client holds in a
round is drawn for it, so both ends know, and no index travels.
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sparing.core.capacity import by_capacity
from sparing.core.errors import ConfigError, MethodError, check_range
from sparing.core.keys import Ctx
from sparing.core.mix import Mix
from sparing.core.protocols import Fit
from sparing.core.tree import Layout, Tree, layout_of
from sparing.core.widths import narrowed, narrower


def bases_of(ratio: float) -> int:
    """How many networks of this width make up the full one.

    >>> bases_of(0.125), bases_of(0.333)
    (8, 3)
    """
    check_range("split-mix.ratio", ratio, 0, 1, open_low=True)
    bases = round(1 / ratio)
    if abs(1 / ratio - bases) > 0.01:
        raise ConfigError(
            f"split-mix.ratio is {ratio:g}, but a whole number of bases must make up the network; use 1/k, such as "
            f"{1 / bases:.4g}"
        )
    return bases


def split(model: nn.Module, bases: int, static: bool = False, seed: int = 0) -> nn.Module:
    """So many networks 1 / bases times as wide, each initialised anew as torch does it; one is the model itself."""
    if bases == 1:
        return model
    layout = layout_of(model, static)
    thin = narrowed(model, layout, narrower(layout, 1 / bases), 1 / bases)
    for name in thin.state_dict():
        if name not in layout.shapes:
            raise MethodError(f"split-mix cannot split {name!r}: it is no tensor of floats that train; drop it")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Mix([initialised(thin) for _ in range(bases)])


def initialised(net: nn.Module) -> nn.Module:
    """A copy with new weights and biases; norms and what else has one axis stay."""
    net = copy.deepcopy(net)
    for layer in net.modules():
        if isinstance(layer, _ConvNd | nn.Linear):
            layer.reset_parameters()
    return net


def some_of(layout: Layout) -> Fit:
    """Client models that mix all bases, or fewer, down to one: size i has i less than all."""
    bases = layout.bases
    counts = range(bases, 0, -1)

    def chosen(size: int, ctx: Ctx) -> Tensor:
        """Which bases each client holds, rising: `[K, counts[size]]`."""
        return ctx.choose("split-mix", bases, counts[size]).nonzero()[:, 1].reshape(-1, counts[size])

    def shrink(state: Tree, model: Tree, size: int, ctx: Ctx) -> Tree:
        if size == 0:
            return model
        places = chosen(size, ctx)
        rows = torch.arange(len(places), device=places.device)[:, None]
        return {name: x.expand(len(places), *x.shape[1:])[rows, places] for name, x in model.items()}

    def grow(resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, dict[str, Tensor | None]]:
        if size == 0:
            return resized, dict.fromkeys(resized)
        mask_K = ctx.choose("split-mix", bases, counts[size])
        full, covered = {}, {}
        for name, x in resized.items():
            full[name] = x.new_zeros(len(mask_K), bases, *x.shape[2:])
            full[name][mask_K] = x.expand(len(mask_K), *x.shape[1:]).flatten(0, 1)
            covered[name] = mask_K.reshape(*mask_K.shape, *[1] * (x.ndim - 2)).expand_as(full[name])
        return full, covered

    def module(model: nn.Module, size: int) -> nn.Module:
        assert isinstance(model, Mix)
        return model.first(counts[size]) if size else model

    layouts = tuple(fewer(layout, count) for count in counts)
    names = tuple(f"{count} of {bases} bases" for count in counts)
    ratios = [count / bases for count in counts]
    return Fit(by_capacity(ratios, "width"), layouts, shrink, grow, module, names, within=True)


def fewer(layout: Layout, count: int) -> Layout:
    """Of so many bases, without what methods put beside the network: they will do so again."""
    shapes = {name: (count, *shape[1:]) for name, shape in layout.shapes.items() if name not in layout.extra}
    dtypes = {name: layout.dtypes[name] for name in shapes}
    return Layout(shapes, dtypes, layout.buffers - layout.extra, bases=count)
