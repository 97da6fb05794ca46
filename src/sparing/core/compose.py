"""From a list of recipes to one method, refusing what does not make sense together."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from sparing.core.codec import chain, feedback, led_past_codec
from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.gaussian import Words, fresh_words
from sparing.core.method import (
    Blended,
    Broadcast,
    Codec,
    Collector,
    Local,
    Method,
    Recipe,
    Remade,
    Report,
    Rule,
    Share,
    Summed,
    Weigh,
    by_samples,
)
from sparing.core.parcel import Cut, Cuts, intersect_cuts
from sparing.core.rules import refuse_kept_sizes, refuse_unsound
from sparing.core.tree import Layout, Tree, prefixed, under


def compose(
    layout: Layout, *recipes: Recipe, local: Local | None = None, arrives: bool = False, words: Words = fresh_words,
    summed: Summed | None = None,
) -> Method:  # fmt: skip
    """Apply recipes in order to plain FedAvg over this layout, and check the result."""
    local = local or Local()
    given: dict[str, Any] = {"local": local, "arrives": arrives, "words": words, "summed": summed}
    method = _apply_recipes(recipes, Method(layout, share_everything(layout, local.buffers), **given))
    refuse_unsound(method)
    if method.fit is None:
        return method
    fit = method.fit.kept if method.fit.kept is not None and method.share.private else method.fit
    sizes = []
    for size, smaller in enumerate(fit.layouts):
        plain = Method(smaller, share_everything(smaller, local.buffers), fit=fit, size=size, **given)
        sizes.append(_apply_recipes(recipes, plain))
    refuse_kept_sizes(method, [(smaller, uplink(smaller)) for smaller in sizes])
    return method._replace(fit=fit, sizes=tuple(sizes))


def remake_model(model: nn.Module, recipes: Sequence[Recipe], static: bool = False, seed: int = 0) -> nn.Module:
    """The network that these recipes train: the task's, unless one of them makes another of it."""
    for make in recipes:
        if isinstance(make, Remade):
            model = make.model(model, static, seed)
    return model


def _apply_recipes(recipes: Sequence[Recipe], method: Method) -> Method:
    for make in recipes:
        method = make(method)
    return method


def share_everything(layout: Layout, buffers: str = "shared") -> Share:
    """Share the whole model; buffers only if they are `shared`, otherwise each client keeps its own."""
    home = frozenset() if buffers == "shared" else layout.buffers
    cuts: Cuts = {name: Cut() for name in layout.shapes if name not in home}
    down, up = (lambda state, model, ctx: cuts), (lambda got, ctx: cuts)
    return Share(down, up, own=home, private=home)


def narrow_share(a: Share, b: Share) -> Share:
    """Both shares at once: what travels is what both let through, what is kept is what either keeps."""

    def init(model: Tree) -> Tree:
        return prefixed("a", a.init(model)) | prefixed("b", b.init(model))

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        return intersect_cuts(a.down(under("a", state), model, ctx), b.down(under("b", state), model, ctx))

    def up(got: Cuts, ctx: Ctx) -> Cuts:
        return intersect_cuts(a.up(got, ctx), b.up(got, ctx))

    def learn(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Report]:
        state_a, said_a = a.learn(under("a", state), blended, ctx)
        state_b, said_b = b.learn(under("b", state), blended, ctx)
        return prefixed("a", state_a) | prefixed("b", state_b), {**said_a, **said_b}

    def given(own: Tree, ctx: Ctx) -> Tree:
        return b.given(a.given(own, ctx), ctx)

    def look(state: Tree, gradient: Tree) -> Tree:
        return prefixed("a", a.look(under("a", state), gradient)) | prefixed("b", b.look(under("b", state), gradient))

    most = min((x for x in (a.most, b.most) if x is not None), default=None)
    kept = (a.own | b.own, a.private | b.private)
    return Share(down, up, init, learn, *kept, given, a.values | b.values, look, most, a.syncs or b.syncs)


def weighed_by(method: Method, weigh: Weigh) -> Method:
    """The method with this weighting; a second one is refused."""
    if method.blend.weigh.name != by_samples.name:
        raise MethodError(
            f"{weigh.name!r} and {method.blend.weigh.name!r} both say how much a client counts; drop one of them"
        )
    return method._replace(blend=method.blend._replace(weigh=weigh))


def collected_by(method: Method, name: str, collect: Collector, lenient: bool = False) -> Method:
    """The method with this blend of everyone at once in the place of its mean; a second one is refused."""
    if method.blend.collect is not None:
        raise MethodError(f"{name!r} follows another robust blend, and arrivals are blended once; keep one of them")
    return method._replace(blend=method.blend._replace(collect=collect, lenient=lenient))


def broadcast_by(method: Method, broadcast: Broadcast) -> Method:
    """The method whose server writes its update so, once a round for everyone; a second way is refused."""
    if method.broadcast is None:
        return method._replace(broadcast=broadcast)
    over = method.broadcast.over or broadcast.over
    if over:
        raise MethodError(
            f"what is merged into {min(over)!r} is broadcast already, as products, and adapters go down as they are, "
            "few as they are; drop broadcast, or set stc.down: false"
        )
    raise MethodError("stc and broadcast both write the server's update; drop one, or set stc.down: false")


def join_shares_beside(a: Share, b: Share) -> Share:
    """Two shares over different tensors: each goes its own way. Only `a` has a state."""

    def down(state: Tree, model: Tree, ctx: Ctx) -> Cuts:
        return a.down(state, model, ctx) | b.down({}, model, ctx)

    def up(got: Cuts, ctx: Ctx) -> Cuts:
        return a.up(got, ctx) | b.up(got, ctx)

    return a._replace(down=down, up=up, own=a.own | b.own, private=a.private | b.private)


def with_rule(method: Method, rule: Rule) -> Method:
    """The method with one more rule that `compose` asks when all recipes have been applied."""
    return method._replace(rules=(*method.rules, rule))


def uplink(method: Method) -> Codec:
    """The client's whole chain, with error feedback around it if the method asks for memory."""
    codec = led_past_codec(chain(*method.up), method.share.values)
    return feedback(codec, method.share.private | method.share.values, method.arrives) if method.memory else codec


def broadcaster(method: Method) -> Codec:
    """The server's whole chain, over its update of the parameters; buffers go past it, exactly as they are."""
    assert method.broadcast is not None
    if method.broadcast.over is not None:
        return chain(*method.broadcast.stages)
    codec = led_past_codec(chain(*method.broadcast.stages), method.layout.buffers)
    home = method.share.private | method.share.values
    return feedback(codec, home) if method.broadcast.memory else codec
