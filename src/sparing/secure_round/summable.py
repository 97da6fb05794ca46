"""Which methods add up under masks, and what to use in place of those that do not.

These rules go by what parts declare. A part that can do with sums in another of its forms says so itself, where
`Method.summed` is set.
"""

import torch

from sparing.core.context import context
from sparing.core.errors import unsummable
from sparing.core.method import Codec, Form, Method, Trait
from sparing.core.round import first_server, outgoing
from sparing.core.tree import Tree
from sparing.secure_round.sum_layout import sum_layout

_INSTEAD: dict[Form, str] = {
    Form.SPARSE: "chooses positions for each client; use {randk: {shared: true}} with memory",
    Form.SUMS: "has the server add up what it remembers of each client; use {int8: {common: true}} with memory",
    Form.BASIS: "changes the basis for each client; use {int8: {common: true}}, or {randk: {shared: true}}",
    Form.CODES: "rounds in steps that are not the same for all clients; use {int8: {common: true}}",
    Form.WRITTEN: "writes values in fewer bytes, and masked ones take as many as others; drop it",
}
"""What stages do that does not add up, and what does."""
_MADE_UP = 8
"""Clients of the trial that tells whether all of them share the same positions."""


def refuse_unsummable(method: Method, initial: Tree) -> None:
    """Raise a MethodError, with the nearest method that adds up, where the server must see single updates."""
    blend = method.blend
    if blend.collect is not None or blend.lenient:
        raise unsummable("the blend judges single updates; drop it: clients can clip their own, by local.clip or dp")
    if method.fit is not None:
        raise unsummable("clients have models of different sizes; drop the recipe that resizes them")
    for codec in method.up:
        if Trait.SUMMABLE not in codec.effect.traits:
            raise unsummable(f"{codec.name!r} {_why_not(codec)}")
    if blend.weigh.looks and blend.weigh.pooled is None:
        raise unsummable(f"{blend.weigh.name!r} weighs single updates; drop it")
    for step in blend.steps:
        if step.pooled is None and step.looks:
            raise unsummable(f"{step.name!r} looks at single updates; drop it")
        if step.serving is not None and not step.serving.notes:
            raise unsummable(f"{step.name!r} serves every client a model of its own; use fedsim, or personal layers")
    if method.share.values:
        raise unsummable(f"{min(method.share.values)!r} goes up as it is, to be compared on the server; drop that")
    if blend.meters:
        raise unsummable("a part of the method measures single uploads; drop it")
    _refuse_different_positions(method, initial)


def _why_not(codec: Codec) -> str:
    return next(
        (why for form, why in _INSTEAD.items() if form & codec.effect.gives),
        "does not add up; drop it: masks hide what a client sends",
    )


def _refuse_different_positions(method: Method, initial: Tree) -> None:
    """Whether two clients would fill their vectors alike, in the first rounds."""
    server = first_server(method, initial, _MADE_UP, gradient=lambda model: model)
    for t in (1, 2):
        ctx = context(0, t, _MADE_UP, range(2), [1, 1], _MADE_UP, _MADE_UP, cohort=2, first=torch.tensor([t == 1] * 2))
        alone = [ctx.at(slice(k, k + 1)) for k in range(2)]
        one, other = (sum_layout(method, outgoing(method, server, each), 2.0, each) for each in alone)
        if not one.is_same(other):
            raise unsummable(
                "clients share different positions; let all share the same: psfed without per_client, or "
                "{randk: {shared: true}}"
            )
