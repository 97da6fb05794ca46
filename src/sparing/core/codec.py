"""Putting codecs together: one after the other (`chain`), and with a memory of what was not sent (`feedback`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparing.core.errors import MethodError
from sparing.core.keys import Ctx
from sparing.core.parcel import Leaf, Parcel, Schema, cleared
from sparing.core.protocols import Codec, View
from sparing.core.tree import Layout, Tree, prefixed, under

SAME = Codec(encode=lambda parcel, state, view: (parcel, {}))


def chain(*codecs: Codec) -> Codec:
    """Encode left to right, decode right to left. `chain()` is the identity."""
    if len(codecs) < 2:
        return codecs[0] if codecs else SAME

    def init(layout: Layout) -> Tree:
        return {k: v for i, codec in enumerate(codecs) for k, v in prefixed(str(i), codec.init(layout)).items()}

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        after: Tree = {}
        for i, codec in enumerate(codecs):
            parcel, memory = codec.encode(parcel, under(str(i), state), view)
            after |= prefixed(str(i), memory)
        return parcel, after

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        for codec in reversed(codecs):
            parcel = codec.decode(parcel, ctx)
        return parcel

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        for codec in codecs:
            expected = codec.schema(expected, ctx)
        return expected

    def lost(parcel: Parcel, state: Tree, ctx: Ctx) -> Tree:
        after: Tree = {}
        for i, codec in reversed(list(enumerate(codecs))):
            after |= prefixed(str(i), codec.lost(parcel, under(str(i), state), ctx))
            parcel = codec.decode(parcel, ctx)
        return after

    name = "+".join(codec.name for codec in codecs)
    traits = frozenset[str]().union(*(codec.traits for codec in codecs))
    known = [codec.changes for codec in codecs if codec.changes is not None]
    changes = frozenset[str]().union(*known) if len(known) == len(codecs) else None
    return Codec(encode, decode, schema, init, lost, name, any(codec.lossy for codec in codecs), traits, changes)


def past(codec: Codec, names: frozenset[str]) -> Codec:
    """The codec with these tensors led past it: they are sent as they are."""
    if not names:
        return codec

    def parted(parcel: Parcel) -> tuple[Parcel, dict[str, Leaf]]:
        aside = {name: leaf for name, leaf in parcel.leaves.items() if name in names}
        return parcel._replace(leaves={n: leaf for n, leaf in parcel.leaves.items() if n not in names}), aside

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        rest, aside = parted(parcel)
        out, state = codec.encode(rest, state, view)
        return out._replace(leaves=out.leaves | aside), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        rest, aside = parted(parcel)
        out = codec.decode(rest, ctx)
        return out._replace(leaves=out.leaves | aside)

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        aside = {name: spec for name, spec in expected.leaves.items() if name in names}
        rest = {name: spec for name, spec in expected.leaves.items() if name not in names}
        out = codec.schema(expected._replace(leaves=rest), ctx)
        return out._replace(leaves=out.leaves | aside)

    def lost(parcel: Parcel, state: Tree, ctx: Ctx) -> Tree:
        return codec.lost(parted(parcel)[0], state, ctx)

    return codec._replace(encode=encode, decode=decode, schema=schema, lost=lost)


def feedback(codec: Codec, private: frozenset[str] = frozenset(), sure: bool = False) -> Codec:
    """Error feedback: what `codec` leaves out or rounds away is added to the next update.

    decoded + residual = wanted, exactly for sparsifiers, to rounding for quantisers. Coordinates outside the scope
    of a round keep their residual, as do clients that sit out. A parcel that never arrived is put back by `lost`.
    Private tensors are never sent, so nothing is remembered of them; nor, where parcels are `sure` to arrive, of what
    the codec leaves as it is.
    """

    apart = codec.changes if sure else None

    def init(layout: Layout) -> Tree:
        residual = {
            name: torch.zeros(1, *layout.shapes[name], dtype=layout.dtypes[name])
            for name in layout.params
            if layout.dtypes[name].is_floating_point and name not in private and (apart is None or name in apart)
        }
        return prefixed("residual", residual) | prefixed("inner", codec.init(layout))

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        residual = under("residual", state)
        leaves = dict(parcel.leaves)
        names = [name for name in residual if name in leaves]
        values = added([leaves[name].value for name in names], [residual[name] for name in names])
        for name, value in zip(names, values, strict=True):
            leaves[name] = leaves[name]._replace(value=cleared(value, leaves[name].scope))
        wanted = Parcel(leaves, parcel.notes)
        out, inner = codec.encode(wanted, under("inner", state), view)
        decoded = codec.decode(out, view.ctx).leaves
        for name in names:
            here, there, scope = leaves[name].value, decoded[name].value, leaves[name].scope
            left = torch.zeros_like(here) if there is here else here - there
            residual[name] = left if scope is None else torch.where(scope, left, residual[name])
        return out, prefixed("residual", residual) | prefixed("inner", inner)

    def lost(parcel: Parcel, state: Tree, ctx: Ctx) -> Tree:
        decoded, residual = codec.decode(parcel, ctx), under("residual", state)
        for name in residual.keys() & decoded.leaves.keys():
            residual[name] = residual[name] + decoded.leaves[name].value
        inner = codec.lost(parcel, under("inner", state), ctx)
        return prefixed("residual", residual) | prefixed("inner", inner)

    return Codec(encode, codec.decode, codec.schema, init, lost, f"memory({codec.name})", codec.lossy, codec.traits)


def added(xs: list[Tensor], ys: list[Tensor]) -> Sequence[Tensor]:
    """Sums of many pairs; on a GPU in few operations."""
    return torch._foreach_add(xs, ys) if xs else []  # pyright: ignore[reportPrivateImportUsage]


def refuse_part(codec: str, name: str, leaf: Leaf) -> None:
    """For codecs that need a whole tensor: `compose` refuses most shares that give parts, this one the rest."""
    if leaf.scope is not None or leaf.told:
        raise MethodError(
            f"{codec} factors whole matrices, but only a part of {name!r} is shared; drop what shares a part (psfed, "
            f"prune) or {codec}: personal layers are fine"
        )
