"""Local training of a chunk of clients without forming their weights: implicit SGD for chains of dense layers.

After some steps of plain SGD a client's weights are W = W0 + D^T H. H `[visits, in]` holds the inputs of all samples it
has visited, D `[visits, out]` the gradients of the outputs, times -lr; its biases are the weights of an input that is
always 1. So a forward is h W0^T + b0 + (h H^T + 1) D and a backward d W0 + (d D^T) H. Where all clients start from the
same W0, its products are one product for the whole chunk, and what is left for each client alone grows with the samples
it has visited, not with its weights. What is added to those is handed on as it is, a `Product` of D and H. Memory per
client: visits * (in + out) a layer.
"""

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparing.accel.bf16 import refuse_half_on_cuda
from sparing.accel.grown import Grown
from sparing.accel.keyed_classes import stacked_copy
from sparing.accel.lazy_product import Product
from sparing.accel.train_cpu.chains import has_hooks
from sparing.accel.train_cpu.fast_copy import copied_facts
from sparing.accel.train_stacked.schedule import StepTable, reported_losses, step_table
from sparing.core.errors import ConfigError
from sparing.core.method import Local, Phase
from sparing.core.threads import intra_op
from sparing.core.tree import Tree
from sparing.data.augment import augment_batch
from sparing.data.clients import Clients
from sparing.data.dataset import to_network_input
from sparing.train.call import PathCall, check_finite
from sparing.train.gradient import gradients
from sparing.train.losses import sample_losses
from sparing.train.optim import is_plain_sgd
from sparing.train.precision import multiplying_on
from sparing.train.working_copy import WorkingCopy, trained_names

PLAIN = (nn.Dropout, nn.ELU, nn.Flatten, nn.GELU, nn.Identity, nn.LeakyReLU, nn.ReLU, nn.Sigmoid, nn.SiLU, nn.Tanh)
"""Layers that look at each sample alone and have nothing to train."""


def can_imply(model: nn.Module, local: Local) -> bool:
    """Whether the model is a chain of dense layers and plain ones, and all training is SGD without anything added.

    >>> can_imply(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), Local()), can_imply(nn.LayerNorm(4), Local())
    (True, False)
    """
    return is_chain(model) and is_all_plain(local)


def is_all_plain(local: Local) -> bool:
    return all(is_plain_sgd(phase) for phase in every_phase(local))


def is_chain(model: nn.Module) -> bool:
    layers = layer_chain(model)
    names = [f"{path}{name}" for path, layer in layers for name in layer.state_dict()]
    dense = [layer for _, layer in layers if type(layer) is nn.Linear]
    fine = all(type(layer) is nn.Linear or is_alone(layer) for _, layer in layers)
    tensors = {id(x) for x in model.state_dict(keep_vars=True).values()}
    return (
        fine
        and not any(map(has_hooks, model.modules()))
        and len(dense) > 0
        and list(model.state_dict()) == names
        and len(tensors) == len(names)
    )


def is_alone(layer: nn.Module) -> bool:
    return type(layer) in PLAIN and not (isinstance(layer, nn.Flatten) and layer.start_dim < 1)


def every_phase(local: Local) -> tuple[Phase, ...]:
    """Of both models that a client may train, and of tuning."""
    return (*local.phases, *local.wrapped_phases, *(local.tune(local.phases) if local.tune else ()))


def layer_chain(model: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """The layers in order, each with what its tensors' names begin with."""
    if type(model) is not nn.Sequential:
        return [(path, model)]
    return [
        pair
        for name, part in model._modules.items()
        if part is not None
        for pair in layer_chain(part, f"{path}{name}.")
    ]


def most_visits(local: Local, samples: int) -> int:
    """Samples that a client of so many visits in one phase, at most.

    >>> most_visits(Local((Phase(epochs=2), Phase(steps=3, batch=10))), samples=12)
    30
    """
    return max(
        phase.epochs * samples if phase.steps is None else phase.steps * min(phase.batch, samples)
        for phase in every_phase(local)
    )


def history_bytes(model: nn.Module, local: Local, samples: int) -> int:
    """Bytes that a client of so many samples takes beside its weights: inputs and gradients of all visits."""
    dense = [layer.weight for _, layer in layer_chain(model) if isinstance(layer, nn.Linear)]
    return most_visits(local, samples) * sum(sum(w.shape) * w.element_size() for w in dense)


class _DenseRows(NamedTuple):
    """One dense layer of K clients in one phase; the rows in the order of its table."""

    path: str  # what the names of its tensors begin with
    weight: Tensor  # [1 or K, out, in] before the phase
    bias: Tensor | None  # [1 or K, out] before the phase
    inputs: Tensor  # [K, visits, in] of all samples visited; no visits where the weight is not trained
    moves: Tensor  # [K, visits, out] -lr times the gradient of the output; no visits where nothing is
    trains: tuple[bool, bool]  # weight, bias
    after: list[nn.Module]  # the plain layers up to the next dense one
    ahead: bool = False  # all inputs were known before the phase
    outputs: Tensor | None = None  # [K, visits, out] of `weight` and `bias`, for all these inputs
    half: Tensor | None = None  # `weight` in bfloat16, where its products have such factors


def train_implicit(lesson: PathCall) -> tuple[Grown, Tensor]:
    """The models after training and the reported losses `[K]`; in bf16, W0 is multiplied by rows in bfloat16."""
    refuse_half_on_cuda(lesson)
    with torch.enable_grad(), multiplying_on(lesson.device, lesson.precision), intra_op(lesson.threads):
        after, losses = _train_without_weights(lesson)
        check_finite(after.added, lesson)
    return after, losses


def _train_without_weights(lesson: PathCall) -> tuple[Grown, Tensor]:
    model, local, start = lesson.model, lesson.local, lesson.start
    copies, k = STILL_COPIES.setdefault(model, []), len(lesson.ctx.ids)
    now = (*copied_facts(model, lesson.device), any(map(has_hooks, model.modules())))
    known, work = copies.pop() if copies else (None, None)
    fits = known == now or is_chain(model)
    if not fits or not is_all_plain(local) or not isinstance(lesson.data.x, Tensor):
        raise ConfigError(
            "implicit training is for networks that are an nn.Sequential of nn.Linear, activations and nn.Dropout, and "
            "for plain SGD (no momentum, decay, clip, prox or correction): use path 'loop' or 'stacked'"
        )
    if work is None or known != now:
        work = _still_copy(model, lesson.device)
    state, added, losses = {name: start[name] for name in work.state}, {}, torch.zeros(k)
    with torch.no_grad():
        for number, phase in enumerate(local.phases):
            state |= {name: state[name] + x for name, x in added.items()}
            added, losses = _train_phase_implicit(work, lesson, phase, number, state)
    copies.append((now, work))
    still = {name: x.new_zeros(k, *x.shape[1:]) for name, x in state.items() if name not in added}
    return Grown(state, {name: added[name] if name in added else still[name] for name in state}), losses


STILL_COPIES: "WeakKeyDictionary[nn.Module, list[tuple[tuple, WorkingCopy]]]" = WeakKeyDictionary()
"""Working copies that nobody trains with now, and what their models were like: making one takes milliseconds."""


def _still_copy(model: nn.Module, device: torch.device) -> WorkingCopy:
    work = stacked_copy(model, device, static=False)
    for layer in work.module.modules():
        if hasattr(layer, "inplace"):
            object.__setattr__(layer, "inplace", False)  # gradients are taken by the outputs of dense layers
    return work


def _train_phase_implicit(
    work: WorkingCopy, lesson: PathCall, phase: Phase, number: int, state: Tree
) -> tuple[Tree, Tensor]:
    """What training adds to the tensors of `state` that move, `[K, ...]`, and the reported losses `[K]`."""
    data, device, half = lesson.data, lesson.device, lesson.precision == "bf16"
    assert isinstance(data.x, Tensor)
    table = step_table(data, phase, number, lesson.ctx, device)
    order = None if table.ordered else table.order.to(device)
    places = torch.cat([at[:, :width] for at, width in zip(table.places, table.width, strict=True)], 1)  # [K, visits]
    before, layers = _laid_out(work, data, state, trained_names(work, phase), table, places, order, device, half)
    y = data.y.index_select(0, places.flatten()).to(device).unflatten(0, places.shape)
    seen = torch.zeros(len(table.alive), len(table.order), dtype=torch.float64, device=device)
    past = 0
    for t, (m, width) in enumerate(zip(table.alive, table.width, strict=True)):
        work.step.begin(table.keys[t, :m])
        now, h = slice(past, past + width), None
        if not layers[0].ahead:
            x = to_network_input(data.x[places[:m, now]].to(device))
            h = _through_layers(before, augment_batch(x, table.views[t, :m], data.augment).flatten(0, 1))
        output, backs = _forward(layers, h, m, now)
        with torch.enable_grad():
            losses = sample_losses(lesson.loss, output.requires_grad_(), y[:m, now].flatten(0, 1)).view(m, width)
            if table.full[t]:
                values = losses.mean(1)
            else:
                real = table.real[t, :m, :width]
                values = torch.where(real, losses, 0.0).sum(1) / real.sum(1)
            (grad,) = gradients(values.sum(), [output])
        _backward(layers, backs, grad * -phase.optimiser.lr, m, now)
        seen[t, :m] = values.detach()
        past += width
    back = None if order is None else order.argsort()
    added: Tree = {}
    for dense in layers:
        added |= _added_by(dense, back)
    return added, reported_losses(seen.cpu(), table, phase, number, lesson.ctx)


def _laid_out(
    work: WorkingCopy, data: Clients, state: Tree, names: list[str], table: StepTable, places: Tensor,
    order: Tensor | None, device: torch.device, half: bool,
) -> tuple[list[nn.Module], list[_DenseRows]]:  # fmt: skip
    """The layers before the first dense one, and the dense ones with what comes after each.

    The first one's inputs of the whole phase are known ahead, where nothing before it is drawn anew. Where all clients
    train in all steps, they also go through its weights in one go.
    """
    layers = layer_chain(work.module)
    at = [i for i, (_, layer) in enumerate(layers) if isinstance(layer, nn.Linear)]
    before, ahead = [layer for _, layer in layers[: at[0]]], None
    if not data.augment and not any(isinstance(layer, nn.Dropout) for layer in before):
        ahead = _first_inputs(before, data, places, layers[at[0]][0], device)
    out = []
    for i, j in zip(at, [*at[1:], len(layers)], strict=True):
        after = [layer for _, layer in layers[i + 1 : j]]
        dense = _dense_rows(layers[i][0], state, names, table, order, ahead if i == at[0] else None, after)
        dense = dense._replace(half=dense.weight.bfloat16() if half else None)
        if dense.ahead and table.alive[-1] == len(table.order):
            dense = dense._replace(outputs=_through(dense, dense.inputs))
        out.append(dense)
    return before, out


def _first_inputs(before: list[nn.Module], data: Clients, places: Tensor, path: str, device: torch.device) -> Tensor:
    """What comes to the first dense layer from the samples in these places: `[K, visits, in]`."""
    assert isinstance(data.x, Tensor)
    h = to_network_input(data.x.index_select(0, places.flatten()).to(device))
    return _sample_rows(_through_layers(before, h), len(places), path)


def _through_layers(layers: list[nn.Module], h: Tensor) -> Tensor:
    for layer in layers:
        h = layer(h)
    return h


def _dense_rows(
    path: str, state: Tree, names: list[str], table: StepTable, order: Tensor | None, ahead: Tensor | None,
    after: list[nn.Module],
) -> _DenseRows:  # fmt: skip
    weight, bias, k = state[f"{path}weight"], state.get(f"{path}bias"), len(table.order)
    trains = f"{path}weight" in names, f"{path}bias" in names
    visits = sum(table.width)
    room = weight.new_empty if table.alive[-1] == k else weight.new_zeros  # zero where a client does not train
    inputs = room(k, visits if trains[0] else 0, weight.shape[2]) if ahead is None else ahead
    moves = room(k, visits if any(trains) else 0, weight.shape[1])
    if order is not None:
        weight = weight[order] if weight.shape[0] > 1 else weight
        bias = bias[order] if bias is not None and bias.shape[0] > 1 else bias
    return _DenseRows(path, weight, bias, inputs, moves, trains, after, ahead is not None)


def _through(dense: _DenseRows, rows: Tensor) -> Tensor:
    """`rows [m, B, in]` through weights and biases before the phase: `[m, B, out]`."""
    weight, bias, m = dense.weight, dense.bias, len(rows)
    if dense.half is None and weight.shape[0] == 1 and bias is not None and bias.shape[0] == 1:
        return torch.addmm(bias, rows.flatten(0, 1), weight[0].T).view(m, -1, bias.shape[1])
    z = _times(rows, weight, dense.half)
    return z if bias is None else z.add_(bias[:m, None])


def _times(rows: Tensor, weight: Tensor, half: Tensor | None) -> Tensor:
    """`rows [m, B, in]` by `weight [1 or K, out, in]` of the first m clients, or by `half`, what it is in bfloat16."""
    if half is not None:
        return _times(rows.bfloat16(), half, None).to(rows.dtype)
    if weight.shape[0] > 1:
        return torch.bmm(rows, weight[: len(rows)].mT)
    return (rows.flatten(0, 1) @ weight[0].T).view(*rows.shape[:2], weight.shape[1])


def _sample_rows(h: Tensor, m: int, path: str) -> Tensor:
    if h.ndim != 2:
        raise ConfigError(
            f"implicit training wants rows of numbers before '{path}weight', seen samples of shape "
            f"{list(h.shape[1:])}: put an nn.Flatten before it or use path 'loop'"
        )
    return h.view(m, -1, h.shape[1])


_Back = Callable[[Tensor], Tensor]
"""Leads the gradient by the outputs of some layers back to their inputs; may overwrite it."""


def _forward(layers: list[_DenseRows], h: Tensor | None, m: int, now: slice) -> tuple[Tensor, list[_Back]]:
    """The outputs of the first m clients, and the ways back through the plain layers after each dense one.

    `h [m * B, ...]` holds what comes to the first dense layer, None where it knows that; `now` says which visits these
    are.
    """
    backs = []
    for dense in layers:
        rows = dense.inputs[:m, now] if h is None else _sample_rows(h, m, dense.path)
        if dense.trains[0] and not dense.ahead:
            dense.inputs[:m, now] = rows
        h, back = _behind(dense.after, _product_now(dense, rows, m, now).flatten(0, 1))
        backs.append(back)
    assert h is not None
    return h, backs


def _behind(layers: list[nn.Module], z: Tensor) -> tuple[Tensor, _Back]:
    """What plain layers make of z, which may be overwritten, and the way back."""
    if not layers:
        return z, lambda grad: grad
    if len(layers) == 1 and type(layers[0]) is nn.ReLU:
        h = z.relu_()
        return h, lambda grad: grad.mul_(h.sign())  # where and masked_fill_ take ten times as long
    with torch.enable_grad():
        out = _through_layers(layers, z.requires_grad_())
    return out.detach(), lambda grad: torch.autograd.grad(out, z, grad)[0]


def _backward(layers: list[_DenseRows], backs: list[_Back], grad: Tensor, m: int, now: slice) -> None:
    """Remembers how the outputs of dense layers move; `grad` is -lr times the gradient by the last layer's output."""
    lowest = next((i for i, dense in enumerate(layers) if any(dense.trains)), len(layers))
    for i in reversed(range(lowest, len(layers))):
        dense, step = layers[i], backs[i](grad).view(m, now.stop - now.start, -1)
        if any(dense.trains):
            dense.moves[:m, now] = step  # padding has no gradient
        if i > lowest:
            grad = _product_back(dense, step, m, now).flatten(0, 1)


def _product_now(dense: _DenseRows, rows: Tensor, m: int, now: slice) -> Tensor:
    """`rows [m, B, in]` through the weights and biases that m clients have now: `[m, B, out]`."""
    z = _through(dense, rows) if dense.outputs is None else dense.outputs[:, now]
    if not now.start or not any(dense.trains):
        return z
    past = slice(0, now.start)
    alike = rows.new_full((1, 1, 1), float(dense.trains[1]))  # inputs now and before, with the one of the biases
    if dense.trains[0]:
        alike = torch.baddbmm(alike, rows, dense.inputs[:m, past].mT)
    alike, moves = alike.expand(m, rows.shape[1], now.start), dense.moves[:m, past]
    return z.baddbmm_(alike, moves) if dense.outputs is None else torch.baddbmm(z, alike, moves)


def _product_back(dense: _DenseRows, step: Tensor, m: int, now: slice) -> Tensor:
    """From the outputs `[m, B, out]` of the weights that m clients have now to their inputs: `[m, B, in]`."""
    out = _times(step, dense.weight.mT, None if dense.half is None else dense.half.mT)
    if now.start and dense.trains[0]:
        past = slice(0, now.start)
        out.baddbmm_(torch.bmm(step, dense.moves[:m, past].mT), dense.inputs[:m, past])
    return out


def _added_by(dense: _DenseRows, back: Tensor | None) -> Tree:
    """What the phase adds to weight and bias, `[K, ...]`; `back` leads to the order of ctx.ids, None: it is that."""
    rows = slice(None) if back is None else back
    out: Tree = {}
    if dense.bias is not None and dense.trains[1]:
        out[f"{dense.path}bias"] = dense.moves[rows].sum(1)
    if dense.trains[0]:
        out[f"{dense.path}weight"] = Product(dense.moves[rows], dense.inputs[rows])
    return out
