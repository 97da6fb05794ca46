"""What arrived from K clients, as differences from the server's model in full shape."""

import torch

from sparing.core.keys import Ctx
from sparing.core.parcel import Cuts, Leaf, Parcel, cleared
from sparing.core.product import less
from sparing.core.protocols import Method
from sparing.core.tree import Tree


def grown(method: Method, model: Tree, got: Parcel, arrived: Parcel, votes: Cuts, ctx: Ctx) -> tuple[Tree, dict]:
    """Client-sized tensors back in full shape, as differences from the model; the others as they are."""
    fit, whole, scope, resized, sent = method.fit, {}, {}, {}, {}
    apart = fit.apart if fit is not None else None
    for name, leaf in arrived.leaves.items():
        same = name in model and leaf.value.shape[1:] == model[name].shape[1:]
        if same and (apart is None or name not in apart.names):
            whole[name], scope[name] = leaf, votes[name].mask
        else:
            sent[name] = got.leaves[name].value if name in got.leaves else torch.zeros_like(leaf.value)
            resized[name] = leaf.value + sent[name]
    stages = method.fit is not None or method.down or method.up
    plain = not stages and all(step.serve is None for step in method.blend.steps)
    update = against(model, got, whole, votes, as_sent=plain and method.share.within)
    if fit is None or not resized:
        return update, scope
    if apart is not None:
        full, covered = apart.cut(resized, fit.size(ctx), ctx)
        return update | full, scope | covered
    full, covered = fit.grow(resized, fit.size(ctx), ctx)
    base = fit.grow(sent, fit.size(ctx), ctx)[0] if fit.increments else model
    return update | {name: cleared(less(x, base[name]), covered[name]) for name, x in full.items()}, scope | covered


def against(model: Tree, got: Parcel, arrived: dict[str, Leaf], votes: Cuts, as_sent: bool) -> Tree:
    """Increments on what was sent, as differences from the model; the same tensors where the model was sent.

    `as_sent`: wherever a client has a vote, it was sent just the model; no codec had a hand in it, either way.
    """
    update, doubtful = {} if as_sent else shifted(model, got, arrived, votes), {}
    for name, leaf in arrived.items():
        sent, scope = got.leaves.get(name), votes[name].mask
        if name in update:
            continue
        # whoever has no vote must not leak into the sum; codecs may fill in what was not sent
        update[name] = leaf.value if as_sent and leaf.scope is scope else cleared(leaf.value, scope)
        if sent is None:
            update[name] = update[name] + cleared(-model[name], scope)
        elif not as_sent and sent.value is not model[name]:
            differs = sent.value != model[name]
            doubtful[name] = (differs if scope is None else differs & scope).any()
    told = torch.stack(list(doubtful.values())).tolist() if doubtful else []
    for name in (name for name, differs in zip(doubtful, told, strict=True) if differs):
        update[name] = update[name] + cleared(got.leaves[name].value - model[name], votes[name].mask)
    return update


def shifted(model: Tree, got: Parcel, arrived: dict[str, Leaf], votes: Cuts) -> Tree:
    """The same of parts of tensors on a GPU, of which it takes longer to ask whether what was sent is the model."""
    parts = [n for n, cut in votes.items() if n in got.leaves and cut.mask is not None and cut.mask.is_cuda]
    parts = [n for n in parts if n in arrived and got.leaves[n].value is not model[n]]
    if not parts:
        return {}
    away = torch._foreach_sub([got.leaves[name].value for name in parts], [model[name] for name in parts])  # pyright: ignore
    moved = torch._foreach_add([arrived[name].value for name in parts], away)  # pyright: ignore
    return {name: cleared(x, votes[name].mask) for name, x in zip(parts, moved, strict=True)}
