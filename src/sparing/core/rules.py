"""What a method may not be: every rule that concerns no single part, each stated once.

A part that makes sense only beside some others brings a rule of its own (`Method.rules`); `compose` asks all of them.
"""

from sparing.core.errors import MethodError
from sparing.core.method import Codec, Form, Method, Trait

UNTAKEN: dict[Form, str] = {
    Form.WRITTEN: "cannot change what is written already; put 'tight' last",
    Form.SUMS: "would change what clients remember and the server adds up; put it first",
    Form.BASIS: "cannot work on values in another basis; drop it or what changes the basis",
    Form.CODES: "needs values, and a quantiser before it gives codes; put it first, or keep one of them",
    Form.SPARSE: "changes the basis, so positions chosen before it mean nothing; put it first",
}
"""Why a codec cannot follow one that gives this."""


def refuse_unsound(method: Method) -> None:
    """Raise a MethodError, with the fix, for the first rule that this method breaks."""
    refuse_order(method.up)
    if method.memory:
        refuse_unsound_memory(method.up)
    refuse_parts(method)
    refuse_what_lasts(method)
    for rule in method.rules:
        rule(method)
    if method.broadcast is not None:
        refuse_broadcast(method, method.broadcast.stages, method.broadcast.memory)
    for step in method.blend.steps:
        if method.blend.collect is not None and step.needs_mean:
            raise MethodError(f"{step.name!r} needs a weighted mean and cannot follow a collecting blend; drop one")


def refuse_order(stages: tuple[Codec, ...]) -> None:
    """What a codec gives decides what may follow."""
    before = Form.VALUES
    for codec in stages:
        for form, why in UNTAKEN.items():
            if form & before & codec.effect.refuses:
                raise MethodError(f"{codec.name!r} {why}")
        before |= codec.effect.gives


def refuse_unsound_memory(stages: tuple[Codec, ...]) -> None:
    """What error feedback cannot stand around."""
    if not any(codec.effect.lossy for codec in stages):
        raise MethodError("memory has nothing to remember: no stage of the uplink is lossy; add one, such as topk")
    for codec in stages:
        if Trait.REMEMBERS in codec.effect.traits:
            raise MethodError(
                f"{codec.name!r} keeps its own memory; drop `memory` from the list, or set memory: false where another "
                "stage brings one"
            )
        if Trait.AMPLIFIES in codec.effect.traits:
            raise MethodError(f"{codec.name!r} scales its values up, which memory would amplify; set unbiased: false")
        if Trait.NOISY in codec.effect.traits:
            raise MethodError(
                f"the error of {codec.name!r} can be larger than the update, which memory would let grow from round to "
                "round; drop memory or quantise more finely"
            )


def refuse_parts(method: Method) -> None:
    """What works on whole tensors cannot follow a share that lets parts of them through."""
    for codec in method.up:
        if Trait.COUNTS in codec.effect.traits and method.share.values:
            raise MethodError(
                f"{codec.name!r} cannot count {min(method.share.values)!r}, which goes up past it as it is; drop one"
            )
        if Trait.WHOLE in codec.effect.traits and method.share.own - method.share.private - method.share.values:
            raise MethodError(
                f"{codec.name!r} factors whole matrices, but only a part of them is shared; drop what shares a part, "
                f"such as partial sharing, or {codec.name!r}: personal layers are fine"
            )


def refuse_what_lasts(method: Method) -> None:
    """Tensors that are gathered have other coordinates each round, so nothing can go on in them."""
    gathering = method.fit.resize.gathering if method.fit else None
    if gathering is None:
        return
    why = f"the server writes {min(gathering.names)!r} in another basis each round"
    if method.broadcast is not None and method.broadcast.over is None:
        raise MethodError(f"broadcast sends updates, but {why}, of which an update is no shorter; {gathering.instead}")
    names = [step.name for step in method.blend.steps] + [method.blend.weigh.name] * method.blend.weigh.looks
    for name in names:
        raise MethodError(f"{name!r} works on updates, but {why}; {gathering.instead}")


def refuse_broadcast(method: Method, stages: tuple[Codec, ...], memory: bool) -> None:
    """How the server may not write its update."""
    refuse_order(stages)
    if memory:
        refuse_unsound_memory(stages)
    parts = method.fit is not None or method.share.own - method.share.private - method.share.values
    for codec in stages:
        if Trait.DEADLINE in codec.effect.traits:
            raise MethodError(
                f"broadcast by {codec.name!r} names no bytes, and a server has no deadline; write {codec.name}: 20kB"
            )
        if Trait.COUNTS in codec.effect.traits and method.layout.buffers - method.share.private:
            raise MethodError(
                f"broadcast by {codec.name!r} cannot count the buffers that go down with it; use ecsq or lowrank, or "
                "set local.buffers: own"
            )
        if Trait.WHOLE in codec.effect.traits and parts:
            raise MethodError(
                f"{codec.name!r} factors whole matrices, but clients get parts of them; broadcast by something else, "
                "such as ecsq, or drop what shares or resizes parts"
            )


def refuse_kept_sizes(method: Method, sizes: list[tuple[Method, Codec]]) -> None:
    """What a client keeps must not depend on its size: the server cuts the resized tensors anew every round."""
    for step in method.blend.steps:
        if step.serving is not None and not step.serving.notes:
            raise MethodError(
                f"{step.name!r} serves every client a model of its own, which cannot be resized; drop one"
            )
    for smaller, codec in sizes:
        for phase in method.local.phases:
            for name in sorted((phase.trains or frozenset()) - set(smaller.layout.params)):
                raise MethodError(
                    f"{name!r} is trained apart from other layers, but clients of some sizes have no such tensor; drop "
                    "what resizes the model or what trains layers apart"
                )
        resized = {n for n, shape in smaller.layout.shapes.items() if method.layout.shapes.get(n) != shape}
        gathering = method.fit.resize.gathering if method.fit else None
        if gathering is not None:
            resized |= {n for n in method.layout.shapes if {n, n.rpartition(".")[0]} & gathering.names}
        home = smaller.share.private if smaller.fit and smaller.fit.within else frozenset()
        memories = (*codec.init(smaller.layout), *smaller.local.init(smaller.layout))
        kept = set(smaller.share.own - home) | {name.rpartition("/")[2] for name in memories}
        for name in sorted(kept & resized):
            factored = "" if method.fit and method.fit.within else "; a personal layer too, or keep it whole"
            raise MethodError(
                f"a client cannot keep a copy or a memory of {name!r}: the server cuts it anew each round, to another "
                "size, other bases or another basis; drop what keeps it (partial sharing, memory, kept momentum"
                f"{factored})"
            )
