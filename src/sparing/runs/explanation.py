"""What a method does, before anything runs: what travels, what stays, what is remembered, and what it costs.

Nothing is asserted about a method here: its own functions are called for one client, with made-up weights, and the
parcels that come out are looked at. Bytes are exact where the method fixes them (with masks, but for the length of a
length per layer). Bounds follow from the schemas of the method's codecs (`wire.bound`): no run exceeds them.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sparing.core.compose import compose, remake_model
from sparing.core.context import Ctx, context
from sparing.core.download import is_whole_model
from sparing.core.errors import ConfigError
from sparing.core.method import Lesson, Method, Trained
from sparing.core.parcel import Cuts, Parcel
from sparing.core.registry import find_recipe
from sparing.core.round import Server, client, first_client, first_row, first_server, method_for_size, outgoing
from sparing.core.tree import Layout, Tree, layout_of, tree_of, under
from sparing.core.versions import commonly_held
from sparing.data.options import name_and_options
from sparing.models import build_network
from sparing.parts.factors import FactoredConv, kernel_sides
from sparing.runs.byte_bounds import bounds_of, cuts_in, shared_values
from sparing.runs.plan.settle import tree_bytes
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.secure_price import SecurePrice, secure_price
from sparing.runs.study import method_list
from sparing.secure_round.settings import SecureSettings
from sparing.secure_round.summable import refuse_unsummable
from sparing.storage.bank import open_bank
from sparing.wire import nbytes

_MADE_UP_CLIENTS, _MADE_UP_SAMPLES, _MADE_UP_ROUNDS = 100, 100, 23
_LATE_ROUNDS = (13, 17, 19, 23, 14)
"""Ordinary rounds to look at: late, and but for the last of prime number, so that they are no full sync; the last only
says whether rounds differ."""
_LOUD_UPDATE = 100.0
"""How large the made-up update is: beyond any threshold, so that no part is left out for being small."""


class DirectionCost(NamedTuple):
    """One direction, for one client and an ordinary round."""

    parameters: int  # values of parameters that the method lets through
    buffers: int
    sent: int  # values of parameters really written, at most; all where the method writes something else of them
    bytes: int  # of an ordinary round: exactly, or at most
    exact: bool  # else `bytes` is a bound
    about: int  # bytes where the update is normally distributed
    most: int  # bytes that no round exceeds, be it a full sync, of a warm-up, or a first contact
    positions: str  # "none": everything is sent; "free": both ends know the positions; "paid": they travel
    notes: list[str]  # numbers that go along


class SizeExplanation(NamedTuple):
    """Clients of one size; most methods have one."""

    name: str
    parameters: int
    multiply_adds: int  # of one sample, forward, in convolutions and matrix products
    down: DirectionCost
    up: DirectionCost
    first_bytes: int  # down, at a client's first contact in the first round
    other_parameters: int | None  # were its factored convolutions split the other way; None: it has none
    other_multiply_adds: int | None


class Explanation(NamedTuple):
    method: str
    model: str
    shape: tuple[int, ...]
    classes: int
    parts: list[dict[str, str]]  # name, about, paper
    parameters: int
    frozen: int  # parameters beside these that neither train nor travel
    stages: list[str]  # of the uplink, in order
    memory: bool
    broadcast: list[str]  # stages of the server's update, in order
    updates: bool  # clients are sent the updates they miss, where that is less than the model
    weighing: str
    steps: list[str]
    layers: list[str]
    private: list[str]  # layers that never leave the client
    own: list[str]  # layers of which clients keep a copy although they travel
    values: list[str]  # layers that go up as they are, for the server to compare
    client_bytes: dict[str, int]  # what a client remembers between rounds
    server_bytes: dict[str, int]
    row_bytes: int  # what the server keeps of each client
    probe: bool  # the server needs labelled samples of its own
    sizes: list[SizeExplanation]
    secure: SecurePrice | None = None  # of secure aggregation, where that was asked for


def explain(
    method: str | list[Any],
    model: str | dict[str, Any] | nn.Module = "cnn",
    shape: tuple[int, ...] = (3, 32, 32),
    classes: int = 10,
    secure: bool = False,
    sample: int = 10,
) -> Explanation:
    """What a method sends, keeps and remembers, and what it costs, before anything runs.

    `model` is a network's name, with options if you like, or an nn.Module of your own for samples of that shape. With
    `secure` it is explained under secure aggregation of `sample` clients a round, who have 100 samples each.

    >>> found = explain("topk+int8+memory", "mlp", shape=(1, 8, 8))
    >>> found.stages, found.sizes[0].up.most < found.sizes[0].down.most
    (['topk', 'int8'], True)
    """
    return explain_method(method, model, tuple(shape), classes, secure, sample)


def explain_method(
    method: str | list[Any],
    model: str | dict[str, Any] | nn.Module,
    shape: tuple[int, ...],
    classes: int,
    secure: bool = False,
    sample: int = 10,
) -> Explanation:
    entries = method_list(method)
    made = recipes_from_entries(entries)
    net = remake_model(_build_made_up(model, shape, classes), made)
    layout = layout_of(net)
    settings = SecureSettings()
    whole = compose(layout, *made, arrives=True, summed=settings.summed if secure else None)
    initial = tree_of(net, layout)
    if secure:
        settings.check(sample)
        refuse_unsummable(whole, initial)
    row = first_row(whole, initial)
    rows = open_bank(row, _MADE_UP_CLIENTS) if row else None
    server = first_server(
        whole, initial, _MADE_UP_CLIENTS, rows, gradient=lambda model: model
    )  # made up, like all values here
    return Explanation(
        method="+".join(name_and_options("method", entry)[0] for entry in entries),
        model=_model_name(model),
        shape=shape,
        classes=classes,
        parts=[_recipe_part(name_and_options("method", entry)[0]) for entry in entries],
        parameters=layout.size,
        frozen=sum(
            x.numel() for name, x in net.named_parameters() if not x.requires_grad and name not in whole.layout.shapes
        ),
        stages=[codec.name for codec in whole.up],
        memory=whole.memory,
        broadcast=[codec.name for codec in whole.broadcast.stages] if whole.broadcast else [],
        updates=_sends_updates(whole, server),
        weighing=whole.blend.weigh.name,
        steps=[step.name for step in whole.blend.steps],
        layers=_module_names(frozenset(layout.shapes), layout),
        private=_module_names(whole.share.private, layout),
        own=_module_names(whole.share.own - whole.share.private, layout),
        values=_module_names(whole.share.values, layout),
        client_bytes=_bytes_by_kind(first_client(whole, initial)) | _last_download_bytes(whole, server),
        server_bytes=_server_bytes(whole, server),
        row_bytes=tree_bytes(row),
        probe=whole.probe,
        sizes=[_explain_size(whole, server, initial, net, shape, one) for one in _client_of_each_size(whole)],
        secure=secure_price(whole, server, settings, _example_cohort(sample)) if secure else None,
    )


def _build_made_up(model: str | dict[str, Any] | nn.Module, shape: tuple[int, ...], classes: int) -> nn.Module:
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_network(model, shape, classes)


def _model_name(model: str | dict[str, Any] | nn.Module) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    return model if isinstance(model, str) else next(iter(model))


def _recipe_part(name: str) -> dict[str, str]:
    entry = find_recipe(name)
    return {"name": entry.name, "about": entry.about, "paper": entry.paper}


def _example_context(client: int, t: int, first: bool) -> Ctx:
    met = torch.tensor([first])
    return context(
        0,
        t,
        _MADE_UP_ROUNDS,
        [client],
        [_MADE_UP_SAMPLES],
        _MADE_UP_CLIENTS,
        _MADE_UP_CLIENTS * _MADE_UP_SAMPLES,
        cohort=_MADE_UP_CLIENTS // 10,
        first=met,
    )


def _example_cohort(clients: int) -> Ctx:
    """So many clients of an ordinary round, all of whom have taken part before."""
    each = (range(clients), [_MADE_UP_SAMPLES] * clients)
    everybody = max(clients, _MADE_UP_CLIENTS)
    samples, met = everybody * _MADE_UP_SAMPLES, torch.zeros(clients, dtype=torch.bool)
    return context(0, _LATE_ROUNDS[0], _MADE_UP_ROUNDS, *each, everybody, samples, cohort=clients, first=met)


def _client_of_each_size(method: Method) -> list[int]:
    """A client of every size."""
    if method.fit is None:
        return [0]
    found: dict[int, int] = {}
    for i in range(_MADE_UP_CLIENTS):
        found.setdefault(int(method.fit.sizes(_example_context(i, _MADE_UP_ROUNDS, first=False))[0]), i)
    return [found[size] for size in sorted(found)]


def _explain_size(
    method: Method, server: Server, initial: Tree, net: nn.Module, shape: tuple[int, ...], who: int
) -> SizeExplanation:
    ctx, theirs, name = _example_context(who, _MADE_UP_ROUNDS, first=False), net, "all"
    if method.fit is not None:
        number = int(method.fit.sizes(ctx)[0])
        theirs, name = (
            method.fit.module(net, number),
            (method.fit.names or [f"size {i}" for i in range(len(method.fit.layouts))])[number],
        )
    seen, downs, ups, travelled = method_for_size(method, ctx), [], [], []
    for t in _LATE_ROUNDS:
        ctx = _example_context(who, t, first=False)
        down = outgoing(method, server, ctx)
        travelled.append((down, ctx))
        downs.append(_direction_cost(down, cuts_in(down), seen))
        up, _ = client(method, first_client(method, initial), down, _loud_training, ctx)
        ups.append(_direction_cost(up, seen.share.up(cuts_in(down), ctx), seen))
    start = _example_context(who, 1, first=True)
    first = outgoing(method, server, start)
    ordinary, always = bounds_of(seen, travelled[:-1]), bounds_of(seen, [(first, start), *travelled], syncs=True)
    other = _split_the_other_way(theirs)
    return SizeExplanation(
        name=name,
        parameters=seen.layout.size,
        multiply_adds=_multiply_adds(theirs, shape),
        down=_bounded(_costliest_round(downs), ordinary.down, always.down, _sends_updates(method, server)),
        up=_bounded(_costliest_round(ups), ordinary.up, always.up, sent=ordinary.sent),
        first_bytes=int(nbytes(first)[0]),
        other_parameters=layout_of(other).size if other else None,
        other_multiply_adds=_multiply_adds(other, shape) if other else None,
    )


def _bounded(
    way: DirectionCost, ordinary: int, always: int, updates: bool = False, sent: int | None = None
) -> DirectionCost:
    """With bounds; `updates`: what is sent is at most that much, or less."""
    exact = way.exact and not updates
    way = way._replace(sent=way.parameters if sent is None else min(way.parameters, sent))
    return way._replace(exact=exact, bytes=way.bytes if exact else ordinary, most=max(always, ordinary))


def _loud_training(lesson: Lesson, ctx: Ctx) -> Trained:
    """Every float moves by a large random number."""
    g, start = torch.Generator().manual_seed(ctx.round), lesson.start
    after = {
        n: x + _LOUD_UPDATE * torch.randn(x.shape, generator=g) if x.is_floating_point() else x
        for n, x in start.items()
    }
    return Trained(after, lesson.memory, {"loss": torch.ones(1)})


def _direction_cost(parcel: Parcel, cuts: Cuts, method: Method) -> DirectionCost:
    exact, index, layout = True, "none", method.layout
    for leaf in parcel.leaves.values():
        if leaf.told or leaf.keep:
            exact, index = False, "paid"
        elif leaf.scope is not None and index == "none" and not bool(leaf.scope.all()):
            index = "free"
        exact &= not leaf.tight
    buffers = shared_values(cuts, layout, layout.buffers)
    params = shared_values(cuts, layout, cuts) - buffers
    total = int(nbytes(parcel)[0])
    return DirectionCost(params, buffers, params, total, exact, total, total, index, list(parcel.notes))


def _costliest_round(ways: list[DirectionCost]) -> DirectionCost:
    """The round that sends most; a bound, if rounds differ by more than the lengths of lengths."""
    largest = max(ways[:-1], key=lambda one: one.bytes)
    alike = max(abs(one.bytes - largest.bytes) for one in ways) <= largest.bytes / 1000 + 8
    return largest._replace(exact=largest.exact and alike)


def _multiply_adds(net: nn.Module, shape: tuple[int, ...]) -> int:
    """Of one sample through the network, as torch counts them."""
    net = copy.deepcopy(net).train()  # in evaluation torch takes shortcuts that it does not count
    tokens = any(isinstance(layer, nn.Embedding) for layer in net.modules())
    samples = torch.zeros(2, *shape, dtype=torch.int64 if tokens else torch.float32)
    counter, steps = FlopCounterMode(display=False), []

    def recurrent(layer: nn.RNNBase, given: tuple[Tensor, ...], out: Any) -> None:
        places = given[0].shape[1] if layer.batch_first else given[0].shape[0]
        steps.append(places * sum(p.numel() for name, p in layer.named_parameters() if name.startswith("weight")))

    for layer in net.modules():
        if isinstance(layer, nn.RNNBase):
            layer.register_forward_hook(recurrent)
    try:
        with counter:
            net(samples)
    except (RuntimeError, ValueError, IndexError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"the model does not take samples of shape {shape}: {said}; give another --shape") from None
    return counter.get_total_flops() // 4 + sum(steps)


def _split_the_other_way(net: nn.Module) -> nn.Module | None:
    """The network with each factored convolution as a whole one to the same rank, then a 1x1 one; None without any."""
    net = copy.deepcopy(net)
    thin = {name: layer for name, layer in net.named_modules() if isinstance(layer, FactoredConv)}
    for name, layer in thin.items():
        m, rank, n = *layer.a.shape[:2], layer.b.shape[1]
        how: dict[str, Any] = {
            key: x if isinstance(x, str) else (*kernel_sides(x)[0], *kernel_sides(layer.across[key])[1])
            for key, x in layer.down.items()
        }
        conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(layer.kernel) - 1]
        owner, _, leaf = name.rpartition(".")
        both = nn.Sequential(
            conv(n, rank, layer.kernel, **how, bias=False), conv(rank, m, 1, bias=layer.bias is not None)
        )
        setattr(net.get_submodule(owner), leaf, both)
    return net if thin else None


def _module_names(names: frozenset[str], layout: Layout) -> list[str]:
    """The modules these tensors belong to, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in layout.shapes if name in names))


def _sends_updates(method: Method, server: Server) -> bool:
    return "held" in server.past and is_whole_model(
        method, server.past, outgoing(method, server, _example_context(0, _MADE_UP_ROUNDS, first=False))
    )


def _last_download_bytes(method: Method, server: Server) -> dict[str, int]:
    """Clients that are sent updates keep what these are added to; a simulation need not."""
    kept = {name: server.model[name] for name in commonly_held(method)} if _sends_updates(method, server) else {}
    return {"its last download": tree_bytes(kept)} if kept else {}


def _server_bytes(method: Method, server: Server) -> dict[str, int]:
    """What the server remembers beside the model, by the part that wants it."""
    steps = {step.name: under(str(i), server.blend) for i, step in enumerate(method.blend.steps)}
    parts = {"the share": server.share, "weights": under("weigh", server.blend), **steps, "factors": server.fit}
    parts["what updates could not say"] = under("memory", server.past)
    return {name: tree_bytes(state) for name, state in parts.items() if state}


def _bytes_by_kind(state: Tree) -> dict[str, int]:
    """Bytes by kind: own copies, memories, momenta."""
    out: dict[str, int] = {}
    for name, x in state.items():
        kind = "/".join(part for part in name.split("/")[:-1] if not part.isdigit())
        out[kind] = out.get(kind, 0) + tree_bytes({name: x})
    return out
