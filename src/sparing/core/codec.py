"""Putting codecs together: one after the other (`chain`), and with a memory of what was not sent (`feedback`)."""

from collections.abc import Callable
from typing import TypeVar

import torch

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import Codec, Effect, View
from sparing.core.ops import add_each
from sparing.core.parcel import Leaf, Parcel, Schema, Spec
from sparing.core.tree import Layout, Tree, cleared, prefixed, under

Part = TypeVar("Part", Leaf, Spec)

IDENTITY = Codec(encode=lambda parcel, state, view: (parcel, {}))


def chain(*codecs: Codec) -> Codec:
    """Encode left to right, decode right to left. `chain()` is the identity."""
    if len(codecs) < 2:
        return codecs[0] if codecs else IDENTITY

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
    over = [codec.over for codec in codecs if codec.over is not None]
    seen = frozenset[str]().union(*over) if len(over) == len(codecs) else None
    return Codec(encode, decode, schema, init, lost, name, _joint_effect(codecs), seen)


def _joint_effect(codecs: tuple[Codec, ...]) -> Effect:
    """All that they give, and all that one of them refuses."""
    effect = codecs[0].effect
    for codec in codecs[1:]:
        gives, refuses, lossy, traits = codec.effect
        effect = Effect(effect.gives | gives, effect.refuses | refuses, effect.lossy or lossy, effect.traits | traits)
    return effect


def only(codec: Codec, names: frozenset[str]) -> Codec:
    """The codec over these tensors; it never sees others, which are sent as they are."""
    return _lead_past(codec, lambda name: name not in names)._replace(over=names)


def led_past_codec(codec: Codec, names: frozenset[str]) -> Codec:
    """The codec with these tensors led past it: they are sent as they are."""
    return _lead_past(codec, lambda name: name in names) if names else codec


def _lead_past(codec: Codec, is_past: Callable[[str], bool]) -> Codec:
    def parted(leaves: dict[str, Part]) -> tuple[dict[str, Part], dict[str, Part]]:
        """What the codec sees, and what goes past it."""
        rest = {name: leaf for name, leaf in leaves.items() if not is_past(name)}
        return rest, {name: leaf for name, leaf in leaves.items() if is_past(name)}

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        rest, aside = parted(parcel.leaves)
        out, state = codec.encode(parcel._replace(leaves=rest), state, view)
        return out._replace(leaves=_in_order(parcel.leaves, out.leaves, aside)), state

    def decode(parcel: Parcel, ctx: Ctx) -> Parcel:
        rest, aside = parted(parcel.leaves)
        out = codec.decode(parcel._replace(leaves=rest), ctx)
        return out._replace(leaves=_in_order(parcel.leaves, out.leaves, aside))

    def schema(expected: Schema, ctx: Ctx) -> Schema:
        rest, aside = parted(expected.leaves)
        out = codec.schema(expected._replace(leaves=rest), ctx)
        if aside:  # a codec says nothing of what it does not see
            past = expected.limit is not None and bool(aside.keys() & expected.limit.names)
            out = out._replace(most=expected.most, limit=expected.limit if past else out.limit)
        return out._replace(leaves=_in_order(expected.leaves, out.leaves, aside))

    def lost(parcel: Parcel, state: Tree, ctx: Ctx) -> Tree:
        return codec.lost(parcel._replace(leaves=parted(parcel.leaves)[0]), state, ctx)

    return codec._replace(encode=encode, decode=decode, schema=schema, lost=lost)


def _in_order(like: dict[str, Part], seen: dict[str, Part], aside: dict[str, Part]) -> dict[str, Part]:
    """Both together: first those that were there before, in their order, then what is new."""
    both = seen | aside
    return {name: both[name] for name in like if name in both} | both


def feedback(codec: Codec, private: frozenset[str] = frozenset(), arrives: bool = False) -> Codec:
    """Error feedback: what `codec` leaves out or rounds away is added to the next update.

    decoded + residual = wanted, exactly for sparsifiers, to rounding for quantisers. Coordinates outside the scope
    of a round keep their residual, as do clients that sit out. A parcel that never arrived is put back by `lost`.
    Private tensors are never sent, so nothing is remembered of them; nor, where every parcel `arrives`, of tensors that
    the codec does not see.
    """
    over = codec.over if arrives else None

    def init(layout: Layout) -> Tree:
        residual = {
            name: torch.zeros(1, *layout.shapes[name], dtype=layout.dtypes[name])
            for name in layout.params
            if layout.dtypes[name].is_floating_point and name not in private and (over is None or name in over)
        }
        return prefixed("residual", residual) | prefixed("inner", codec.init(layout))

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        residual = under("residual", state)
        leaves = dict(parcel.leaves)
        names = [name for name in residual if name in leaves]
        values = add_each([leaves[name].value for name in names], [residual[name] for name in names])
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

    return Codec(encode, codec.decode, codec.schema, init, lost, f"memory({codec.name})", codec.effect)


def refuse_part(codec: str, name: str, leaf: Leaf) -> None:
    """For codecs that need a whole tensor: `compose` refuses most shares that give parts, this one the rest."""
    if leaf.scope is not None or leaf.told:
        raise MethodError(
            f"{codec} factors whole matrices, but only a part of {name!r} is shared; drop what shares a part (psfed, "
            f"prune) or {codec}: personal layers are fine"
        )
