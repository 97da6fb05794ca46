"""From a list of recipes to one method, refusing what does not make sense together."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from sparing.core.codec import chain, feedback, past
from sparing.core.errors import MethodError
from sparing.core.keys import Ctx
from sparing.core.normal import Words, fresh
from sparing.core.parcel import Cut, Cuts, intersect
from sparing.core.private import refuse_leaks
from sparing.core.protocols import Blended, Codec, Local, Method, Recipe, Remade, Report, Share, Weigh, by_samples
from sparing.core.tree import Layout, Tree, prefixed, under


def compose(
    layout: Layout, *recipes: Recipe, local: Local | None = None, sure: bool = False, words: Words = fresh
) -> Method:
    """Apply recipes in order to plain FedAvg over this layout, and check the result; `sure`, `words`: see `Method`."""
    local = local or Local()
    given: dict[str, Any] = {"local": local, "sure": sure, "words": words}
    method = applied(recipes, Method(layout, everything(layout, local.buffers), **given))
    refuse_unsound(method)
    if method.fit is None:
        return method
    fit = method.fit.kept if method.fit.kept is not None and method.share.private else method.fit
    sizes = []
    for size, smaller in enumerate(fit.layouts):
        plain = Method(smaller, everything(smaller, local.buffers), fit=fit, size=size, **given)
        sizes.append(applied(recipes, plain))
    refuse_state_of_sizes(method, sizes)
    return method._replace(fit=fit, sizes=tuple(sizes))


def remade(model: nn.Module, recipes: Sequence[Recipe], static: bool = False, seed: int = 0) -> nn.Module:
    """The network that these recipes train: the task's, unless one of them makes another of it."""
    for make in recipes:
        if isinstance(make, Remade):
            model = make.model(model, static, seed)
    return model


def applied(recipes: Sequence[Recipe], method: Method) -> Method:
    for make in recipes:
        method = make(method)
    return method


def everything(layout: Layout, buffers: str = "shared") -> Share:
    """Share the whole model; buffers only if they are `shared`, otherwise each client keeps its own."""
    home = frozenset() if buffers == "shared" else layout.buffers
    cuts: Cuts = {name: Cut() for name in layout.shapes if name not in home}
    down, up = (lambda state, model, ctx: cuts), (lambda got, ctx: cuts)
    return Share(down, up, own=home, private=home, within=True, whole=True)


def narrow(a: Share, b: Share) -> Share:
    """Both shares at once: what travels is what both let through, what is kept is what either keeps."""

    def init(model: Tree) -> Tree:
        return prefixed("a", a.init(model)) | prefixed("b", b.init(model))

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        return intersect(a.down(under("a", state), model, ctx), b.down(under("b", state), model, ctx))

    def up(got: Cuts, ctx: Ctx) -> Cuts:
        return intersect(a.up(got, ctx), b.up(got, ctx))

    def learn(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Report]:
        state_a, said_a = a.learn(under("a", state), blended, ctx)
        state_b, said_b = b.learn(under("b", state), blended, ctx)
        return prefixed("a", state_a) | prefixed("b", state_b), said_a | said_b

    def given(own: Tree, ctx: Ctx) -> Tree:
        return b.given(a.given(own, ctx), ctx)

    def look(state: Tree, gradient: Tree) -> Tree:
        return prefixed("a", a.look(under("a", state), gradient)) | prefixed("b", b.look(under("b", state), gradient))

    both = a.own | b.own, a.private | b.private
    how = a.within and b.within, a.whole and b.whole
    return Share(down, up, init, learn, *both, given, a.values | b.values, look, *how)


def weighed_by(method: Method, weigh: Weigh) -> Method:
    """The method with this weighting; a second one is refused."""
    if method.blend.weigh.name != by_samples.name:
        raise MethodError(
            f"{weigh.name!r} and {method.blend.weigh.name!r} both say how much a client counts; drop one of them"
        )
    return method._replace(blend=method.blend._replace(weigh=weigh))


def beside(a: Share, b: Share) -> Share:
    """Two shares over different tensors: each goes its own way. Only `a` has a state."""

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        return a.down(state, model, ctx) | b.down({}, model, ctx)

    def up(got: Cuts, ctx: Ctx) -> Cuts:
        return a.up(got, ctx) | b.up(got, ctx)

    both = a.own | b.own, a.private | b.private
    how = {"within": a.within and b.within, "whole": a.whole and b.whole}
    return a._replace(down=down, up=up, own=both[0], private=both[1], **how)


def uplink(method: Method) -> Codec:
    """The client's whole chain, with error feedback around it if the method asks for memory."""
    codec = past(chain(*method.up), method.share.values)
    return feedback(codec, method.share.private | method.share.values, method.sure) if method.memory else codec


def downlink(method: Method) -> Codec:
    return chain(*method.down)


def broadcaster(method: Method) -> Codec:
    """The server's whole chain, over its update of the parameters; buffers go past it, exactly as they are."""
    assert method.broadcast is not None
    codec = past(chain(*method.broadcast.stages), method.layout.buffers)
    home = method.share.private | method.share.values
    return feedback(codec, home) if method.broadcast.memory else codec


def refuse_unsound(method: Method) -> None:
    for stages in (method.up, method.down):
        refuse_order(stages)
    if method.memory:
        refuse_memory(method.up)
    refuse_sums(method)
    refuse_parts(method)
    refuse_leaks(method)
    if method.broadcast is not None:
        refuse_broadcast(method, method.broadcast.stages, method.broadcast.memory)
    for step in method.blend.steps:
        step.check(method)
        if method.blend.collect is not None and step.needs_mean:
            raise MethodError(f"{step.name!r} needs a weighted mean and cannot follow a collecting blend; drop one")
    for codec in method.down:
        if codec.init(method.layout):
            raise MethodError(f"{codec.name!r} remembers per client and cannot compress the downlink; use it upstream")
        if "sparse" in codec.traits:
            raise MethodError(f"{codec.name!r} would send zeros for weights it leaves out; use it upstream")
        if "basis" in codec.traits:
            raise MethodError(f"{codec.name!r} changes the basis for each client apart; use it upstream")


def refuse_state_of_sizes(method: Method, sizes: list[Method]) -> None:
    """What a client keeps must not depend on its size: the server cuts the resized tensors anew every round."""
    for part in method.blend.steps:
        if part.serve is not None and not part.notes:
            raise MethodError(
                f"{part.name!r} serves every client a model of its own, which cannot be resized; drop one"
            )
    for smaller in sizes:
        for phase in method.local.phases:
            for name in sorted((phase.trains or frozenset()) - set(smaller.layout.params)):
                raise MethodError(
                    f"{name!r} is trained apart from other layers, but clients of some sizes have no such tensor; drop "
                    "what resizes the model or what trains layers apart"
                )
        resized = {n for n, shape in smaller.layout.shapes.items() if method.layout.shapes.get(n) != shape}
        home = smaller.share.private if smaller.fit and smaller.fit.within else frozenset()
        kept = set(smaller.share.own - home) | {n.rpartition("/")[2] for n in uplink(smaller).init(smaller.layout)}
        kept |= {n.rpartition("/")[2] for n in smaller.local.init(smaller.layout)}
        for name in sorted(kept & resized):
            factored = "" if method.fit and method.fit.within else "; a personal layer too, or name it in fedhm.keep"
            raise MethodError(
                f"a client cannot keep a copy or a memory of {name!r}: the server cuts it anew each round, to another "
                "size, other bases or another basis; drop what keeps it (partial sharing, memory, kept momentum"
                f"{factored})"
            )


def refuse_order(stages: tuple[Codec, ...]) -> None:
    before: frozenset[str] = frozenset()
    for codec in stages:
        name, here = codec.name, codec.traits
        if "written" in before:
            raise MethodError(f"{name!r} cannot change what is written already; put 'tight' last")
        if "written" not in here and "sums" in before:
            raise MethodError(f"{name!r} would change what clients remember and the server adds up; put it first")
        if "written" not in here and "basis" in before:
            raise MethodError(f"{name!r} cannot work on values in another basis; drop it or what changes the basis")
        if "codes" in before:
            if "codes" in here:
                raise MethodError(f"{name!r} cannot follow another quantiser: its input is codes already; keep one")
            if "unbiased" in here:
                raise MethodError(f"{name!r} cannot scale codes up; put it before the quantiser or set unbiased: false")
            if "ranks" in here:
                raise MethodError(f"{name!r} over: model cannot compare codes of layers scaled apart; put it first")
        if "values" in here and "codes" in before:
            raise MethodError(f"{name!r} needs values, not the codes of a quantiser; put it before the quantiser")
        if here & {"basis", "mixes"} and "sparse" in before:
            raise MethodError(f"{name!r} changes the basis, so positions chosen before it mean nothing; put it first")
        before |= here


def refuse_memory(stages: tuple[Codec, ...]) -> None:
    if not any(codec.lossy for codec in stages):
        raise MethodError("memory has nothing to remember: no stage of the uplink is lossy; add one, such as topk")
    for codec in stages:
        if "rotates" in codec.traits:
            raise MethodError(
                f"memory cannot hold residuals of {codec.name!r}: its basis rotates every round; drop memory"
            )
        if "remembers" in codec.traits:
            raise MethodError(
                f"{codec.name!r} keeps its own memory; drop `memory` from the list, or set memory: false where another "
                "stage brings one"
            )
        if "unbiased" in codec.traits:
            raise MethodError(f"{codec.name!r} scales its values up, which memory would amplify; set unbiased: false")
        if "noisy" in codec.traits:
            raise MethodError(
                f"the error of {codec.name!r} can be larger than the update, which memory would let grow from round to "
                "round; drop memory or quantise more finely"
            )


def refuse_parts(method: Method) -> None:
    """What works on whole tensors cannot follow a share that lets parts of them through."""
    for codec in method.up:
        if "counts" in codec.traits and method.share.values:
            raise MethodError(
                f"{codec.name!r} cannot count {min(method.share.values)!r}, which goes up past it as it is; drop one"
            )
        if "whole" in codec.traits and method.share.own - method.share.private - method.share.values:
            raise MethodError(
                f"{codec.name!r} factors whole matrices, but only a part of them is shared; drop what shares a part "
                f"(psfed) or {codec.name!r}: personal layers are fine"
            )


def refuse_broadcast(method: Method, stages: tuple[Codec, ...], memory: bool) -> None:
    refuse_order(stages)
    if memory:
        refuse_memory(stages)
    if method.down:
        raise MethodError(
            f"broadcast writes the server's update, and {method.down[0].name!r} its values; the download is one or the "
            "other: drop one"
        )
    parts = method.fit is not None or method.share.own - method.share.private - method.share.values
    for codec in stages:
        if "deadline" in codec.traits:
            raise MethodError("broadcast.by budget names no bytes, and a server has no deadline; write budget: 20kB")
        if "counts" in codec.traits and method.layout.buffers - method.share.private:
            raise MethodError(
                f"broadcast by {codec.name!r} cannot count the buffers that go down with it; use ecsq or lowrank, or "
                "set local.buffers: own"
            )
        if "whole" in codec.traits and parts:
            raise MethodError(
                f"{codec.name!r} factors whole matrices, but clients get parts of them; broadcast by something else, "
                "such as ecsq, or drop what shares or resizes parts"
            )


def refuse_sums(method: Method) -> None:
    """A server that adds up, over the rounds, what clients sent must always weigh them alike and send all the same."""
    for codec in method.up:
        if "sums" in codec.traits:
            served = [step.name for step in method.blend.steps if step.serve is not None and not step.notes]
            odd = served + [codec.name for codec in method.down]
            odd += [step.name for step in method.blend.steps if step.receive is not None]
            names = [step.name for step in method.blend.steps if not step.reports]
            odd += names[: names.index("ef21")] if "ef21" in names else []
            if method.blend.weigh.name != by_samples.name:
                odd.append(method.blend.weigh.name)
            if odd:
                raise MethodError(
                    f"{codec.name!r} adds up what clients send over the rounds, which needs one model for all, sent as "
                    f"it is, and weights by samples; drop {odd[0]!r}"
                )
