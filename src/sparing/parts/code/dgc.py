"""Deep gradient compression: momentum before the sparsifier instead of after it.

With G a client's update, U its momentum and V what it has not sent yet,

    U <- m U + G,  V <- V + U,  send the largest entries of V,  U and V <- 0 where sent

G is scaled down first where its norm over all tensors is above clip / sqrt(clients in the round).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import ConfigError, check_range
from sparing.core.method import Codec, Effect, Form, Trait, View
from sparing.core.parcel import Leaf, Parcel, Schema, sent_mask
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, cleared, column, prefixed, under


def ratio_ramp(ratio: float, warmup: int) -> Callable[[int], float]:
    """The share sent in round t: falls by equal factors from 1 before the first round to `ratio` after `warmup`.

    >>> [round(ratio_ramp(0.001, 4)(t), 4) for t in (1, 2, 3, 4, 5, 6)]
    [0.2512, 0.0631, 0.0158, 0.004, 0.001, 0.001]
    """
    check_range("dgc.ratio", ratio, 0, 1, open_low=True)
    if warmup < 0:
        raise ConfigError(f"dgc.warmup is {warmup}; it must be 0 or more rounds")
    return lambda t: ratio if t > warmup else ratio ** (t / (warmup + 1))


def dgc_codec(
    layout: Layout, names: list[str], thin: Callable[[int], Codec], momentum: float = 0.9, clip: float | None = None
) -> Codec:
    """Around the sparsifier `thin(round)`, which remembers nothing."""
    check_range("dgc.momentum", momentum, 0, 1)
    if clip is not None:
        check_range("dgc.clip", clip, 0, math.inf, open_low=True)

    def init(_: Layout) -> Tree:
        zeros = {name: torch.zeros(1, *layout.shapes[name], dtype=layout.dtypes[name]) for name in names}
        return prefixed("velocity", zeros) | prefixed("unsent", zeros)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        velocity, unsent, leaves = under("velocity", state), under("unsent", state), dict(parcel.leaves)
        here = [name for name in names if name in leaves]
        scale_K = _clip_scale([leaves[name] for name in here], clip, view.ctx)
        for name in here:
            leaf = leaves[name]
            g = leaf.value if scale_K is None else leaf.value * column(scale_K, leaf.value).to(leaf.value.dtype)
            velocity[name] = _inside_scope(leaf, momentum * velocity[name] + g, velocity[name])
            unsent[name] = _inside_scope(leaf, unsent[name] + velocity[name], unsent[name])
            leaves[name] = leaf._replace(value=cleared(unsent[name], leaf.scope))
        out, _ = thin(view.ctx.round).encode(Parcel(leaves, parcel.notes), {}, view)
        for name in here:
            gone = sent_mask(out.leaves[name])
            velocity[name], unsent[name] = _left_unsent(velocity[name], gone), _left_unsent(unsent[name], gone)
        return out, prefixed("velocity", velocity) | prefixed("unsent", unsent)

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        return thin(ctx.round).decode(parcel, ctx)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        return thin(ctx.round).schema(expected, ctx)

    def lost(parcel: Parcel, state: Tree, ctx: Ctx) -> Tree:
        """What was sent waits again; the momentum it had is gone."""
        decoded, state = decode(parcel, ctx), dict(state)
        for name in names:
            if name in decoded.leaves:
                state[f"unsent/{name}"] = state[f"unsent/{name}"] + decoded.leaves[name].value
        return state

    gives, refuses, _, traits = thin(1).effect
    effect = Effect(gives | Form.SPARSE, refuses | Form.CODES, traits=traits | Trait.REMEMBERS)
    return Codec(encode, decode, schema, init, lost, "dgc", effect)


def _clip_scale(leaves: list[Leaf], clip: float | None, ctx: Ctx) -> Tensor | None:
    """By how much each client's update is scaled down, `[K]`."""
    if clip is None or not leaves:
        return None
    square_K = torch.stack([total(leaf.value.double().square()) for leaf in leaves])
    limit = clip / math.sqrt(ctx.cohort)
    norm_K = total(square_K.T).sqrt()
    return torch.where(norm_K > limit, limit / norm_K.clamp(min=limit), 1.0)


def _left_unsent(x: Tensor, gone: Tensor | None) -> Tensor:
    """Zero where something was sent; None: everywhere."""
    return torch.zeros_like(x) if gone is None else cleared(x, ~gone)


def _inside_scope(leaf: Leaf, new: Tensor, old: Tensor) -> Tensor:
    """What is outside the scope of a round waits."""
    return new if leaf.scope is None else torch.where(leaf.scope, new, old)
