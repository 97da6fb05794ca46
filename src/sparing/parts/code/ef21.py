"""EF21: clients and server keep an estimate of every client's update, and only its corrections travel.

    client k:   c_k = C(u_k - g_k),  g_k <- g_k + c_k
    server:     g <- g + sum over those here of (n_k / n) c_k,  the model moves by g

n_k are samples, n those of all clients, so that g = sum over all clients of (n_k / n) g_k, also when few take part.
"""

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import (
    Arrival,
    Blended,
    Codec,
    Effect,
    Form,
    Method,
    Report,
    Step,
    Trait,
    View,
    by_samples,
)
from sparing.core.parcel import Parcel
from sparing.core.reduce import total
from sparing.core.tree import Layout, Tree, prefixed, under

NAME = "ef21"


def ef21_codec(layout: Layout, names: list[str], codec: Codec) -> Codec:
    """Over any compressor C whose error is smaller than what it is given."""
    if codec.effect.traits & (Trait.AMPLIFIES | Trait.NOISY):
        raise MethodError(
            f"ef21 needs a compressor whose error is smaller than its input, and that of {codec.name!r} may be larger; "
            "use topk, sign or int8"
        )

    def init(_: Layout) -> Tree:
        start = {name: torch.zeros(1, *layout.shapes[name], dtype=layout.dtypes[name]) for name in names}
        return prefixed("estimate", start) | prefixed("inner", codec.init(layout))

    def encode(parcel: Parcel, state: Tree, view: View) -> tuple[Parcel, Tree]:
        estimate, leaves = under("estimate", state), dict(parcel.leaves)
        here = estimate.keys() & leaves.keys()
        for name in sorted(here):
            if leaves[name].scope is not None or leaves[name].told:
                raise MethodError(
                    f"ef21 keeps sums over all clients, but only a part of {name!r} is shared; drop what shares a "
                    "part (psfed, prune) or ef21: personal layers are fine"
                )
            leaves[name] = leaves[name]._replace(value=leaves[name].value - estimate[name])
        out, inner = codec.encode(Parcel(leaves, parcel.notes), under("inner", state), view)
        decoded = codec.decode(out, view.ctx)
        estimate |= {name: estimate[name] + decoded.leaves[name].value for name in here}
        return out, prefixed("estimate", estimate) | prefixed("inner", inner)

    def lost(parcel: Parcel, state: Tree, ctx: Ctx) -> Tree:
        decoded, estimate = codec.decode(parcel, ctx), under("estimate", state)
        for name in estimate.keys() & decoded.leaves.keys():
            estimate[name] = estimate[name] - decoded.leaves[name].value
        inner = codec.lost(parcel, under("inner", state), ctx)
        return prefixed("estimate", estimate) | prefixed("inner", inner)

    gives, refuses, _, traits = codec.effect
    effect = Effect(gives | Form.SUMS, refuses, traits=traits | Trait.REMEMBERS)
    return Codec(encode, codec.decode, codec.schema, init, lost, f"ef21({codec.name})", effect)


def ef21_estimate_step(names: list[str]) -> Step:
    """The server's end: adds the corrections to its estimate, by which the model moves."""

    def init(model: Tree, clients: int) -> Tree:
        return {name: torch.zeros_like(model[name], dtype=torch.float64) for name in names}

    def watch(state: Tree, arrival: Arrival) -> dict[str, Tensor]:
        return {"n": arrival.notes["n"]}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        share = total(blended.seen["n"][None]) / ctx.samples
        moved = {name: g + blended.update[name] * share for name, g in state.items() if name in blended.update}
        return blended.update | moved, state | moved, {}

    return Step(apply, init, watch, name=NAME, needs_mean=True)


def refuse_other_sums(method: Method) -> None:
    """A server that adds up, over the rounds, what clients sent must always weigh them alike and send all the same."""
    for codec in method.up:
        if Form.SUMS in codec.effect.gives:
            steps = method.blend.steps
            odd = [step.name for step in steps if step.serving is not None and not step.serving.notes]
            odd += [step.name for step in steps if step.receive is not None]
            names = [step.name for step in steps]
            odd += names[: names.index(NAME)]
            odd += [method.blend.weigh.name] if method.blend.weigh.name != by_samples.name else []
            if odd:
                raise MethodError(
                    f"{codec.name!r} adds up what clients send over the rounds, which needs one model for all, sent as "
                    f"it is, and weights by samples; drop {odd[0]!r}"
                )
