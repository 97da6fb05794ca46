"""What a method with a `Privacy` may not do: everything that would let out more than the accountant counts."""

import torch

from sparing.core.errors import MethodError
from sparing.core.keys import Ctx
from sparing.core.parcel import Schema
from sparing.core.protocols import Codec, Method, Step, nothing

STAGE = "dp"
"""The name of the uplink's stage and of the server's step that keep the promise."""


def refuse_leaks(method: Method) -> None:
    if method.privacy is None:
        return
    refuse_buffers(method)
    refuse_values(method)
    refuse_stages(method.up, method.privacy.mode)
    if method.privacy.mode == "central":
        refuse_server(method)


def refuse_buffers(method: Method) -> None:
    """Noise on a running variance can turn it negative, and counts of batches tell how much data there is."""
    layout = method.layout
    for name in sorted(layout.buffers - layout.extra - method.share.private):
        raise MethodError(f"dp does not share buffers such as {name!r}; set local.buffers to static or own")


def refuse_values(method: Method) -> None:
    for name in sorted(method.share.values):
        raise MethodError(f"{name!r} goes up as it is, past clipping and noise; drop what compares it on the server")


def refuse_stages(stages: tuple[Codec, ...], mode: str) -> None:
    """Clipping needs values, local noise must be drawn before the data chooses positions, and notes are not noised."""
    before: frozenset[str] = frozenset()
    passed = False
    for codec in stages:
        if codec.name == STAGE:
            passed = True
            if before & {"codes", "basis"} or (mode == "local" and "sparse" in before):
                raise MethodError("dp must come before sparsifiers and quantisers; move it to the front of the list")
        elif told(codec):
            raise MethodError(
                f"{codec.name!r} sends {told(codec)[0]!r} as it is, computed from a client's data, which dp cannot "
                "cover; drop one"
            )
        before |= codec.traits
    if not passed:
        raise MethodError("dp is promised, but no stage of the uplink clips; put dp into the list of recipes")


def told(codec: Codec) -> list[str]:
    """The notes that this stage adds to a parcel."""
    one = torch.ones(1, dtype=torch.int64)
    return list(codec.schema(Schema({}, {}), Ctx(0, 1, 1, one - 1, one, 1, 1)).notes)


def refuse_server(method: Method) -> None:
    """The noise covers a mean with equal weights, and whatever is computed from it afterwards."""
    blend = method.blend
    if method.fit is not None:
        raise MethodError("dp in central mode needs clients of one size; drop what resizes models, or use mode: local")
    if blend.collect is not None or blend.lenient:
        raise MethodError("dp in central mode needs a plain mean; drop the robust blend, or use mode: local")
    if blend.weigh.name != "uniform":
        raise MethodError(
            f"dp in central mode counts every client alike, but {blend.weigh.name!r} weighs them; drop it, or use "
            "mode: local"
        )
    for step in blend.steps:
        if step.name != STAGE and looks(step):
            raise MethodError(
                f"{step.name!r} looks at single updates before dp's noise is added; drop it, or use mode: local"
            )
    if blend.steps[0].name != STAGE:
        raise MethodError(f"the server's first step must be dp's noise, but it is {blend.steps[0].name!r}; put dp last")


def looks(step: Step) -> bool:
    sees = step.watch is not nothing or step.plain or step.receive is not None
    return step.keep is not nothing or (sees and not step.reports)
