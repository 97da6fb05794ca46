"""Local training of a chunk of clients without forming their weights: implicit SGD for chains of dense layers.

After some steps of plain SGD a client's weights are W = W0 + D^T H. H `[visits, in]` holds the inputs of all samples it
has visited, D `[visits, out]` the gradients of the outputs, times -lr. So a forward is h W0^T + b + (h H^T) D and a
backward d W0 + (d D^T) H. Where all clients start from the same W0, its products are one product for the whole chunk,
and what is left for each client alone grows with the samples it has visited, not with its weights. What is added to
those is handed on as it is, a `Product` of D and H. Memory per client: visits * (in + out) a layer.
"""

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparing.core.errors import ConfigError
from sparing.core.keys import Ctx
from sparing.core.product import Product
from sparing.core.protocols import Local, Phase
from sparing.core.tree import Grown, Tree
from sparing.task.augment import augmented
from sparing.task.chain import hooked
from sparing.task.clients import Clients
from sparing.task.dataset import prepared
from sparing.task.loop import gradients
from sparing.task.losses import Loss, each
from sparing.task.optim import is_plain
from sparing.task.schedule import Plan, plan_of, reported
from sparing.task.working import Working, signature, trained, working_copy

PLAIN = (nn.Dropout, nn.ELU, nn.Flatten, nn.GELU, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Tanh)
"""Layers that look at each sample alone and have nothing to train."""


def can_imply(model: nn.Module, local: Local) -> bool:
    """Whether the model is a chain of dense layers and plain ones, and all training is SGD without anything added.

    >>> can_imply(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), Local()), can_imply(nn.LayerNorm(4), Local())
    (True, False)
    """
    return is_chain(model) and all(is_plain(phase) for phase in every_phase(local))


def is_chain(model: nn.Module) -> bool:
    layers = chain(model)
    names = [f"{path}{name}" for path, layer in layers for name in layer.state_dict()]
    dense = [layer for _, layer in layers if type(layer) is nn.Linear]
    fine = all(type(layer) is nn.Linear or is_alone(layer) for _, layer in layers)
    tensors = {id(x) for x in model.state_dict(keep_vars=True).values()}
    return (
        fine
        and not any(map(hooked, model.modules()))
        and len(dense) > 0
        and list(model.state_dict()) == names
        and len(tensors) == len(names)
    )


def is_alone(layer: nn.Module) -> bool:
    return type(layer) in PLAIN and not (isinstance(layer, nn.Flatten) and layer.start_dim < 1)


def every_phase(local: Local) -> tuple[Phase, ...]:
    """Of both models that a client may train, and of tuning."""
    return (*local.phases, *local.second, *(local.tune(local.phases) if local.tune else ()))


def chain(model: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """The layers in order, each with what its tensors' names begin with."""
    if type(model) is not nn.Sequential:
        return [(path, model)]
    return [pair for name, part in model._modules.items() if part is not None for pair in chain(part, f"{path}{name}.")]


def most_visits(local: Local, samples: int) -> int:
    """Samples that a client of so many visits in one phase, at most.

    >>> most_visits(Local((Phase(epochs=2), Phase(steps=3, batch=10))), samples=12)
    30
    """
    return max(
        phase.epochs * samples if phase.steps is None else phase.steps * min(phase.batch, samples)
        for phase in every_phase(local)
    )


def history(model: nn.Module, local: Local, samples: int) -> int:
    """Bytes that a client of so many samples takes beside its weights: inputs and gradients of all visits."""
    dense = [layer.weight for _, layer in chain(model) if isinstance(layer, nn.Linear)]
    return most_visits(local, samples) * sum(sum(w.shape) * w.element_size() for w in dense)


class Dense(NamedTuple):
    """One dense layer of K clients in one phase; the rows in the order of its plan."""

    path: str  # what the names of its tensors begin with
    weight: Tensor  # [1 or K, out, in] before the phase
    bias: Tensor | None  # [K, out] now
    inputs: Tensor  # [K, visits, in] of all samples visited; no visits where the weight is not trained
    moves: Tensor  # [K, visits, out] -lr times the gradient of the output
    trains: tuple[bool, bool]  # weight, bias
    ahead: bool = False  # all inputs were known before the phase
    outputs: Tensor | None = None  # [K, visits, out] of `weight` alone, for all these inputs


def implicit(
    model: nn.Module, loss: Loss, data: Clients, local: Local, start: Tree, ctx: Ctx, device: torch.device
) -> tuple[Grown, Tensor]:
    """The models after training and the reported losses `[K]`."""
    if not can_imply(model, local):
        raise ConfigError(
            "implicit training is for networks that are an nn.Sequential of nn.Linear, activations and nn.Dropout, and "
            "for plain SGD (no momentum, decay, clip, prox or correction): use path 'loop' or 'stacked'"
        )
    copies, k = COPIES.setdefault(model, []), len(ctx.ids)
    now = signature(model, device)
    known, work = copies.pop() if copies else (None, None)
    if work is None or known != now:
        work = still_copy(model, device)
    state, added, losses = {name: start[name] for name in work.state}, {}, torch.zeros(k)
    for number, phase in enumerate(local.phases):
        state |= {name: state[name] + x for name, x in added.items()}
        added, losses = train_phase(work, loss, data, phase, number, state, ctx, device)
    copies.append((now, work))
    still = {name: x.new_zeros(k, *x.shape[1:]) for name, x in state.items() if name not in added}
    return Grown(state, {name: added[name] if name in added else still[name] for name in state}), losses


COPIES: "WeakKeyDictionary[nn.Module, list[tuple[tuple, Working]]]" = WeakKeyDictionary()
"""Working copies that nobody trains with now, and what their models were like: making one takes milliseconds."""


def still_copy(model: nn.Module, device: torch.device) -> Working:
    work = working_copy(model, device, stacked=True, static=False)
    for layer in work.module.modules():
        if hasattr(layer, "inplace"):
            object.__setattr__(layer, "inplace", False)  # gradients are taken by the outputs of dense layers
    return work


def train_phase(
    work: Working, loss: Loss, data: Clients, phase: Phase, number: int, state: Tree, ctx: Ctx, device: torch.device
) -> tuple[Tree, Tensor]:
    """What training adds to the tensors of `state` that move, `[K, ...]`, and the reported losses `[K]`."""
    plan = plan_of(data, phase, number, ctx, device)
    order = None if plan.ordered else plan.order.to(device)
    layers = laid_out(work, data, state, trained(work, phase), plan, order, device)
    ahead = layers[0][1] is not None and layers[0][1].ahead
    seen = torch.zeros(len(plan.alive), len(plan.order), dtype=torch.float64, device=device)
    past = 0
    for t, (m, width) in enumerate(zip(plan.alive, plan.width, strict=True)):
        places = plan.places[t, :m, :width]
        work.step.begin(plan.keys[t, :m])
        now, h = slice(past, past + width), None
        if not ahead:
            h = augmented(prepared(data.x[places].to(device)), plan.views[t, :m], data.augment).flatten(0, 1)
        output, steps = forward(layers, h, m, now)
        losses = each(loss, output, data.y[places].to(device).flatten(0, 1)).view(m, width)
        if plan.full[t]:
            values = losses.mean(1)
        else:
            real = plan.real[t, :m, :width]
            values = torch.where(real, losses, 0.0).sum(1) / real.sum(1)
        grads = gradients(values.sum(), [z for *_, z in steps])
        for (dense, rows, _), grad in zip(steps, grads, strict=True):
            remember(dense, rows, grad, m, now, phase.lr)
        seen[t, :m] = values.detach()
        past += width
    back = None if order is None else order.argsort()
    added: Tree = {}
    for _, dense in layers:
        if dense is not None:
            added |= formed(dense, state, back)
    return added, reported(seen.cpu(), plan, phase, number, ctx)


Layers = list[tuple[nn.Module, Dense | None]]


def laid_out(
    work: Working, data: Clients, state: Tree, names: list[str], plan: Plan, order: Tensor | None, device: torch.device
) -> Layers:
    """All layers, or those from the first dense one on, where its inputs of the whole phase can be known ahead.

    Where all clients train in all steps, they also go through its weights in one go.
    """
    layers = chain(work.module)
    first = next(i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear))
    ahead = None
    if not data.augment and not any(isinstance(layer, nn.Dropout) for _, layer in layers[:first]):
        ahead = first_inputs(layers[: first + 1], plan, data, device)
        layers = layers[first:]
    out: Layers = []
    for i, (path, layer) in enumerate(layers):
        dense = None
        if isinstance(layer, nn.Linear):
            dense = dense_of(path, state, names, plan, order, None if i else ahead)
        if dense is not None and dense.ahead and plan.alive[-1] == len(plan.order):
            dense = dense._replace(outputs=through(dense, dense.inputs))
        out.append((layer, dense))
    return out


def first_inputs(layers: list[tuple[str, nn.Module]], plan: Plan, data: Clients, device: torch.device) -> Tensor:
    """What comes to the last of these layers from the samples of all visits: `[K, visits, in]`."""
    places = torch.cat([at[:, :width] for at, width in zip(plan.places, plan.width, strict=True)], 1)
    h = prepared(data.x.index_select(0, places.flatten()).to(device))
    for _, layer in layers[:-1]:
        h = layer(h)
    return rows_of(h, len(places), layers[-1][0])


def dense_of(path: str, state: Tree, names: list[str], plan: Plan, order: Tensor | None, ahead: Tensor | None) -> Dense:
    weight, bias, k = state[f"{path}weight"], state.get(f"{path}bias"), len(plan.order)
    trains = f"{path}weight" in names, f"{path}bias" in names
    visits = sum(plan.width) if trains[0] else 0
    room = weight.new_empty if plan.alive[-1] == k else weight.new_zeros  # zero where a client does not train
    inputs = room(k, visits, weight.shape[2]) if ahead is None else ahead
    moves = room(k, visits, weight.shape[1])
    weight = weight[order] if weight.shape[0] > 1 and order is not None else weight
    if bias is not None:
        bias = bias.expand(k, -1).clone() if order is None else bias.expand(k, -1)[order]
    return Dense(path, weight, bias, inputs, moves, trains, ahead is not None)


def through(dense: Dense, rows: Tensor) -> Tensor:
    """`rows [m, B, in]` through the weights before the phase: `[m, B, out]`."""
    if dense.weight.shape[0] > 1:
        return torch.bmm(rows, dense.weight[: len(rows)].mT)
    return (rows.reshape(-1, rows.shape[2]) @ dense.weight[0].T).unflatten(0, rows.shape[:2])


def rows_of(h: Tensor, m: int, path: str) -> Tensor:
    if h.ndim != 2:
        raise ConfigError(
            f"implicit training wants rows of numbers before '{path}weight', seen samples of shape "
            f"{list(h.shape[1:])}: put an nn.Flatten before it or use path 'loop'"
        )
    return h.unflatten(0, (m, -1))


Used = tuple[Dense, Tensor, Tensor]
"""A dense layer that is trained, what went in `[m, B, in]`, and what came out `[m, B, out]`."""


def forward(layers: Layers, h: Tensor | None, m: int, now: slice) -> tuple[Tensor, list[Used]]:
    """The outputs of the first m clients, and how the dense layers were used; `now` says which visits these are.

    `h [m * B, ...]` holds their samples, None where the first layer knows its inputs.
    """
    steps = []
    for layer, dense in layers:
        if dense is None:
            h = layer(h)
            continue
        rows = dense.inputs[:m, now] if h is None else rows_of(h, m, dense.path)
        z = product(dense, rows, m, now)
        if any(dense.trains):
            z.requires_grad_()
            steps.append((dense, rows.detach(), z))
        h = z.flatten(0, 1)
    assert h is not None
    return h, steps


def product(dense: Dense, rows: Tensor, m: int, now: slice) -> Tensor:
    """`rows [m, B, in]` through the weights that m clients have now: `[m, B, out]`."""
    z = through(dense, rows) if dense.outputs is None else dense.outputs[:, now]
    if dense.bias is not None:
        z = z + dense.bias[:m, None]
    if now.start and dense.trains[0]:
        past = slice(0, now.start)
        z = torch.baddbmm(z, torch.bmm(rows, dense.inputs[:m, past].mT), dense.moves[:m, past])
    return z


def remember(dense: Dense, rows: Tensor, grad: Tensor, m: int, now: slice, lr: float) -> None:
    """One step of SGD on the first m clients; padding has no gradient."""
    step = torch.mul(grad, -lr, out=dense.moves[:m, now]) if dense.trains[0] else grad * -lr
    if dense.trains[0] and not dense.ahead:
        dense.inputs[:m, now] = rows
    if dense.bias is not None and dense.trains[1]:
        dense.bias[:m] += step.sum(1)


def formed(dense: Dense, state: Tree, back: Tensor | None) -> Tree:
    """What the phase adds to weight and bias, `[K, ...]`; `back` leads to the order of ctx.ids, None: it is that."""
    rows = slice(None) if back is None else back
    out: Tree = {}
    if dense.bias is not None and dense.trains[1]:
        name = f"{dense.path}bias"
        out[name] = dense.bias[rows] - state[name]
    if dense.trains[0]:
        out[f"{dense.path}weight"] = Product(dense.moves[rows], dense.inputs[rows])
    return out
