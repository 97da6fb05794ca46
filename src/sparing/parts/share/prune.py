"""Permanent pruning by magnitude: the smallest weights of the initial model are zero for good and never travel.

Both ends can build the initial model, so both know the mask and it costs no bytes. Training leaves the zeros of pruned
tensors alone (`Phase.holds`), so a pruned weight is zero on the server and on every client, always.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.compose import share_everything
from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, MethodError, check_range
from sparing.core.method import Share
from sparing.core.parcel import Cut, Cuts
from sparing.core.reduce import largest_in_rows
from sparing.core.tree import Layout, Tree, cleared, flat


class Pruned(NamedTuple):
    share: Share
    names: frozenset[str]  # weights that are pruned: those with two axes or more

    def first(self, model: Tree) -> Tree:
        """The pruned tensors of the initial model."""
        return {name: cleared(model[name], mask) for name, mask in self.share.init(model).items()}


def prune_by_magnitude(layout: Layout, keep: float = 0.5, over: str = "layer") -> Pruned:
    """Keep the max(1, ceil(keep * P)) largest of the P weights of every layer, or of all layers together."""
    check_range("prune.keep", keep, 0, 1, open_low=True)
    if over not in ("layer", "model"):
        raise ConfigError(f"prune.over is {over!r}; use 'layer' or 'model'")
    names = [n for n in layout.floats if len(layout.shapes[n]) > 1]
    if not names:
        raise MethodError("prune would prune nothing: no weight of the model has two axes; drop it")
    whole = share_everything(layout)
    groups = [[name] for name in names] if over == "layer" else [names]
    sizes = [sum(math.prod(layout.shapes[name]) for name in group) for group in groups]

    def kept_of(size: int) -> int:
        return max(1, math.ceil(size * keep * (1 - 2.0**-50)))

    def init(model: Tree) -> Tree:
        out: Tree = {}
        for group in groups:
            values = torch.cat([flat(model[name]) for name in group], dim=1)
            count = kept_of(values.shape[1])
            masks = largest_in_rows(values, count).split([model[name][0].numel() for name in group], dim=1)
            out |= {name: mask.reshape(model[name].shape) for name, mask in zip(group, masks, strict=True)}
        return out

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        return whole.down({}, model, ctx) | {name: Cut(mask) for name, mask in state.items()}

    def up(got: Cuts, ctx: Ctx) -> Cuts:
        return whole.up(got, ctx) | {name: Cut(got[name].mask) for name in names if name in got}

    def given(own: Tree, ctx: Ctx) -> Tree:
        """Clients without a copy of their own fill up what they are sent with zeros."""
        return {name: zeros(layout.shapes[name], layout.dtypes[name], ctx) for name in names if name not in own} | own

    most = layout.size - sum(sizes) + sum(map(kept_of, sizes))
    return Pruned(Share(down, up, init, given=given, most=most), frozenset(names))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, ctx: Ctx) -> Tensor:
    return torch.zeros(1, *shape, dtype=dtype, device=ctx.device)
