"""What blends add to frozen layers: NAME.merged.weight beside NAME.base, in float32, the same for everyone.

Clients neither train nor send it. The server moves it by products of thin matrices, which it writes once a round for
everyone: clients are sent those that they miss, or the sum, whichever is shorter (`core.versions`). Everybody adds up
the same float32 factors in float64, on the CPU and one thread, so all hold the same bits.
"""

import math

import torch
from torch import Tensor

from sparing.core.compose import broadcast_by, join_shares_beside, with_rule
from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import LOSSLESS, Broadcast, Codec, Method, Share, View
from sparing.core.parcel import Cut, Cuts, Leaf, Parcel, Schema, Spec
from sparing.core.threads import intra_op
from sparing.core.tree import Layout, Tree
from sparing.parts.size.lora.adapted import MERGED, A, B, Shape
from sparing.parts.size.lora.products import Pair
from sparing.parts.size.lora.ranks import adapter_layers


def merged_shapes(layout: Layout) -> dict[str, Shape]:
    """Of what is merged into each adapted layer, by name."""
    shapes = layout.shapes
    return {
        f"{path}.{MERGED}": (shapes[f"{path}.{B}"][0], *shapes[f"{path}.{A}"][1:]) for path in adapter_layers(layout)
    }


def with_merged(method: Method) -> Method:
    """The method in which the server may add to the frozen layers."""
    shapes, first = merged_shapes(method.layout), method.extra
    layout, names, own = method.layout, frozenset(shapes), method.share.up
    cuts: Cuts = {name: Cut() for name in shapes}

    def extra(model: Tree) -> Tree:
        device = next(iter(model.values())).device
        return first(model) | {name: torch.zeros(1, *shape, device=device) for name, shape in shapes.items()}

    def up(got: Cuts, ctx: Ctx) -> Cuts:
        return {name: cut for name, cut in own(got, ctx).items() if name not in names}

    beside = Share(down=lambda state, model, ctx: cuts, up=lambda got, ctx: {})
    method = method._replace(
        layout=layout._replace(
            shapes=layout.shapes | shapes,
            dtypes=layout.dtypes | dict.fromkeys(shapes, torch.float32),
            buffers=layout.buffers | names,
            extra=layout.extra | names,
        ),
        share=join_shares_beside(method.share, beside)._replace(up=up),
        extra=extra,
    )
    method = broadcast_by(method, Broadcast((products_codec(shapes),), memory=False, seeded=True, over=names))
    return with_rule(method, refuse_rounds_without)


def refuse_rounds_without(method: Method) -> None:
    """A rule: who is served must get what was merged, or miss it for good."""
    if method.share.most == 0 and method.share.syncs:
        raise MethodError(
            "lora.blend adds to everyone's base, but rounds of psfed.fraction 0 send nothing of that, and the next "
            "psfed.sync does; share a part in every round, or set lora.blend to average"
        )


def change_of(path: str, pair: Pair) -> Tree:
    """B A as an update says it to `products_codec`."""
    b, a = pair
    return {f"{path}.{MERGED}/p": b.mT.float()[None], f"{path}.{MERGED}/q": a.float()[None]}


def products_codec(shapes: dict[str, Shape]) -> Codec:
    """Sums of products, each tensor's as the factors NAME/p `[rank, m]` and NAME/q `[rank, n]`, or as NAME/whole where
    these would be longer."""

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        leaves: dict[str, Leaf] = {}
        for name in view.start:
            p, q = (parcel.leaves[f"{name}/{end}"].value if f"{name}/p" in parcel.leaves else None for end in "pq")
            leaves |= _written_change(name, shapes[name], p, q)
        return Parcel(leaves, parcel.notes), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        leaves = {}
        for name, shape in shapes.items():
            if f"{name}/p" in parcel.leaves:
                p, q, whole = (parcel.leaves[f"{name}/{end}"] for end in ("p", "q", "whole"))
                rows = p.keep[0].flatten().cpu()
                sum_of = whole.value.cpu().double() + _product(p.value[0].cpu()[rows], q.value[0].cpu()[rows], shape)
                leaves[name] = Leaf(sum_of.to(ctx.device))
        return Parcel(leaves, parcel.notes)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        leaves: dict[str, Spec] = {}
        for name in expected.leaves:
            most, m, n = _sides(shapes[name])
            leaves[f"{name}/p"] = Spec((most, m), grains=((most, 1),))
            leaves[f"{name}/q"] = Spec((most, n), grains=((most, 1),))
            leaves[f"{name}/whole"] = Spec(shapes[name], grains=((1,) * len(shapes[name]),))
        return expected._replace(leaves=leaves)

    return Codec(encode, decode, schema, name="factors of what was merged", effect=LOSSLESS)


def _sides(shape: Shape) -> tuple[int, int, int]:
    """The rank up to which factors are no longer than the matrix, and its sides.

    >>> _sides((6, 3, 2, 2))
    (4, 6, 12)
    """
    m, n = shape[0], math.prod(shape[1:])
    return m * n // (m + n), m, n


def _written_change(name: str, shape: Shape, p: Tensor | None, q: Tensor | None) -> dict[str, Leaf]:
    (most, m, n), rank = _sides(shape), 0 if p is None else p.shape[1]
    keep, thin = torch.arange(most) < (rank if rank <= most else 0), [torch.zeros(1, most, side) for side in (m, n)]
    whole, one = torch.zeros(1, *shape), torch.tensor(rank > most).reshape(1, *[1] * len(shape))
    if p is not None and q is not None:
        if rank <= most:
            thin[0][:, :rank], thin[1][:, :rank] = p.cpu(), q.cpu()
        else:
            whole = _product(p[0].cpu(), q[0].cpu(), shape).float()
    keep = keep.reshape(1, most, 1)
    return {
        f"{name}/p": Leaf(thin[0], keep=(keep,)),
        f"{name}/q": Leaf(thin[1], keep=(keep,)),
        f"{name}/whole": Leaf(whole, keep=(one,)),
    }


def _product(p: Tensor, q: Tensor, shape: Shape) -> Tensor:
    """The sum over r of the products of row r of p and row r of q, as a weight, float64."""
    with intra_op(1):
        return (p.double().mT @ q.double()).reshape(1, *shape)
