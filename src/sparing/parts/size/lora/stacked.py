"""Adapters side by side, weights into one of them, join everyone's base, and new ones start (FLoRA).

The base becomes W + sum_k w_k s_k B_k A_k, whatever the ranks. No adapter travels down: B is zero and A is drawn anew
each round, at both ends. Up goes what a client's B has become, and what its A has become beyond the rows drawn.
"""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.method import LOSSLESS, Codec, Gathering, Method, Remembered, Report, Resize, View
from sparing.core.parcel import Cuts, Parcel
from sparing.core.tree import Masks, Tree
from sparing.parts.size.lora.adapted import A, B, Shape, keyed_rows
from sparing.parts.size.lora.gathered import matrices_of
from sparing.parts.size.lora.merged import change_of
from sparing.parts.size.lora.ranks import Ranks, factor_side, leading_columns

INSTEAD = "set lora.blend to exact, average or freeze-a, whose coordinates last"


def stacked_resize(layers: list[str], ranks: Ranks) -> Resize:
    """The sum of everyone's products is the base's; the server's own adapters stay as they began, a product of zero."""

    def shrink(state: Remembered, model: Tree, size: int, ctx: Ctx) -> Tree:
        return {name: leading_columns(name, x, ranks.offered[size]) for name, x in model.items()}

    def grow(resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, Masks]:
        return resized, dict.fromkeys(resized)  # gathered as they are

    def blend(model: Tree, came: list[Tree], weight: Tensor, ctx: Ctx) -> tuple[Tree, Report]:
        share, change = (weight / sum(weight.tolist())).double().cpu(), {}
        for path in layers:
            pairs = [matrices_of(x[f"{path}.{B}"], x[f"{path}.{A}"], ranks) for x in came]
            stacked = torch.cat([w * b for w, (b, _) in zip(share, pairs, strict=True)], 1)
            if stacked.shape[1]:
                change |= change_of(path, (stacked, torch.cat([a for _, a in pairs])))
        return change, {}

    names = frozenset(f"{path}.{end}" for path in layers for end in (A, B))
    return Resize(shrink, grow, gathering=Gathering(names, blend, INSTEAD))


def with_new_adapters(method: Method) -> Method:
    """The method whose adapters do not come down, but start anew."""
    shapes = {name: method.layout.shapes[name] for name in method.layout.params if factor_side(name)}
    share, dtypes = method.share, method.layout.dtypes

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        return {name: cut for name, cut in share.down(state, model, ctx).items() if name not in shapes}

    def given(own: Tree, ctx: Ctx) -> Tree:
        zeros = {n: torch.zeros(1, *shapes[n], dtype=dtypes[n], device=ctx.device) for n in shapes if n.endswith(B)}
        rows = {name: new_rows(name, shapes[name], ctx).to(dtypes[name]) for name in shapes if name.endswith(A)}
        return share.given(own, ctx) | zeros | rows

    return method._replace(share=share._replace(down=down, given=given), up=(beyond_rows_codec(shapes), *method.up))


def new_rows(name: str, shape: Shape, ctx: Ctx) -> Tensor:
    """What this A starts the round from, `[1, rank, *shape]`: in the first, what every adapter starts from."""
    path, before = name.removesuffix(f".{A}"), ctx.round - 1
    return ctx.once(
        ("rows", name, shape), lambda: keyed_rows(path, ctx.seed, before, shape[0], shape[1:])[None].to(ctx.device)
    )


def beyond_rows_codec(shapes: dict[str, Shape]) -> Codec:
    """Of A, what it has beyond the rows that both ends draw."""

    def moved(parcel: Parcel, sign: int, ctx: Ctx) -> Parcel:
        leaves = dict(parcel.leaves)
        for name in shapes:
            if name.endswith(A) and name in leaves:
                value = leaves[name].value
                leaves[name] = leaves[name]._replace(value=value + sign * new_rows(name, shapes[name], ctx).to(value))
        return parcel._replace(leaves=leaves)

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        return moved(parcel, -1, view.ctx), state

    return Codec(encode, lambda parcel, ctx: moved(parcel, 1, ctx), name="what was added to A", effect=LOSSLESS)
