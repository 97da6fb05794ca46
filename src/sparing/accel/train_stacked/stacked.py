"""Local training of a whole chunk of clients in one step: vmap over grad over functional_call.

Clients are lined up by their number of steps, longest first, so those still training are always the first m rows and
a finished client's weights, momenta and statistics are simply not touched any more. Weights that all share and nobody
trains, such as a frozen base, stay one, so a product with them is one for all clients. Within a batch, short clients
are padded with one of their own samples, which no loss and no statistic counts. The samples of a batch must not look at
each other except through BatchNorm.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.accel.keyed_classes import LoopNorm, stacked_copy
from sparing.accel.train_stacked.schedule import counted_in_tokens, reported_losses, step_table
from sparing.core.errors import ConfigError
from sparing.core.method import Phase
from sparing.core.threads import intra_op
from sparing.core.tree import Tree
from sparing.data.augment import augment_batch
from sparing.data.dataset import to_network_input
from sparing.data.inputs import Samples
from sparing.train.call import PathCall, check_finite
from sparing.train.losses import Loss, batch_mean, sample_losses, sample_weights
from sparing.train.model_call import call_with_state
from sparing.train.optim import (
    beside_rows,
    factor_pairs,
    first_beside_rows,
    first_memory_rows,
    fresh_memory,
    recalled_memory,
    remember_velocities,
    update_params,
)
from sparing.train.precision import multiplying_on
from sparing.train.torch_optimisers import is_of_torch
from sparing.train.working_copy import WorkingCopy, trained_names


def train_stacked(lesson: PathCall) -> tuple[Tree, Tensor]:
    """The models after training and the reported losses `[K]`; `lesson.memory` is overwritten with what came of it."""
    if lesson.precision == "bf16":
        raise ConfigError(
            "path 'stacked' on a CPU trains in float32, but precision is bf16: use 'loop-fast' or 'implicit'"
        )
    with torch.enable_grad(), multiplying_on(lesson.device, lesson.precision), intra_op(lesson.threads):
        after, losses = _train_together(lesson)
        check_finite(after, lesson)
    return after, losses


def _train_together(lesson: PathCall) -> tuple[Tree, Tensor]:
    start, device = lesson.start, lesson.device
    for how in (phase.optimiser for phase in lesson.local.phases):
        if is_of_torch(how):
            raise ConfigError(f"torch's {how.name} with its options trains one client at a time: use path 'loop'")
    work = stacked_copy(lesson.model, device, lesson.static)
    refuse_unstackable(work.module)
    k = len(lesson.ctx.ids)
    lent = lent_names(work, lesson.local.phases, start)
    first = {name: start[name].expand(k, *start[name].shape[1:]) for name in work.state}
    state = {n: start[n] if n in lent else x.clone(memory_format=torch.contiguous_format) for n, x in first.items()}
    losses = torch.zeros(k)
    for number, phase in enumerate(lesson.local.phases):
        losses = _train_phase_together(work, lesson, phase, number, state, lent)
    state |= {name: first[name].clone() if name in work.params else first[name] for name in lent}
    return {name: state[own] if name == own else state[own].clone() for name, own in work.alias.items()}, losses


def lent_names(work: WorkingCopy, phases: Sequence[Phase], start: Tree) -> set[str]:
    """Names in `work.state` of weights that all clients share and that no phase trains."""
    trained = {name for phase in phases for name in trained_names(work, phase)}
    weights = {name for name, x in work.state.items() if isinstance(x, nn.Parameter)}
    return {name for name in weights - trained if start[name].shape[0] == 1}


def lent_apart(tree: Tree, lent: Container[str]) -> tuple[Tree, dict[str, int | None]]:
    """As `vmap` takes them: what is lent without its client axis, and where the axis of the others is."""
    values = {name: x[0] if name in lent else x for name, x in tree.items()}
    return values, {name: None if name in lent else 0 for name in tree}


def _train_phase_together(
    work: WorkingCopy, lesson: PathCall, phase: Phase, number: int, state: Tree, lent: set[str]
) -> Tensor:
    """Train all rows of `state`, in place, and give the reported losses `[K]`."""
    data, device, remembered = lesson.data, lesson.device, lesson.memory
    table = step_table(data, phase, number, lesson.ctx, device)
    names = trained_names(work, phase)
    rows = {name: x if name in lent else x[table.order.to(device)] for name, x in state.items()}
    beside = beside_rows(lesson.aside, phase, names, table.order.to(device))
    step = _batch_step(work, lesson.loss, names, lent)
    memory = fresh_memory(phase, [rows[name] for name in names])
    memory = recalled_memory(memory, names, remembered, table.order.to(device))
    pairs = factor_pairs(names)
    seen = torch.zeros(len(table.alive), len(table.order), dtype=torch.float64, device=device)
    for t, (m, width) in enumerate(zip(table.alive, table.width, strict=True)):
        places = table.places[t, :m, :width]
        real = None if table.full[t] else table.real[t, :m, :width]
        now = {name: x[:m] for name, x in rows.items()}
        samples = to_network_input(data.x[places].to(device))
        if isinstance(samples, Tensor):
            samples = augment_batch(samples, table.views[t, :m], data.augment)
        grads, values, changed = step(now, samples, data.y[places].to(device), real, table.keys[t, :m])
        params, steering = [now[name] for name in names], first_beside_rows(beside, m)
        update_params(phase, t, params, grads, steering, first_memory_rows(memory, m), pairs, stacked=True)
        for name, x in changed.items():
            now[name].copy_(x)
        seen[t, :m] = values
    back = table.order.to(device)
    for name, x in rows.items():
        if name not in lent:
            state[name][back] = x
    remember_velocities(memory, names, remembered, back)
    return reported_losses(seen.cpu(), counted_in_tokens(table, lesson.loss, data.y), phase, number, lesson.ctx)


_Stepper = Callable[[Tree, Samples, Tensor, Tensor | None, Tensor], tuple[list[Tensor], Tensor, Tree]]


def _batch_step(work: WorkingCopy, loss: Loss, names: list[str], lent: set[str]) -> _Stepper:
    """One step of m clients: (state, x, y, real, keys) -> (gradients in order of names, losses `[m]`, new buffers)."""
    buffers = [name for name, x in work.state.items() if not isinstance(x, nn.Parameter)]

    def forward(
        params: Tree, rest: Tree, x: Samples, y: Tensor, real: Tensor | None, key: Tensor
    ) -> tuple[Tensor, Tree]:
        work.step.begin(key, real)
        state = {**params, **rest}
        losses = sample_losses(loss, call_with_state(work.module, state, x), y)
        return batch_mean(losses, sample_weights(loss, y), real), {name: state[name].detach() for name in buffers}

    def step(
        state: Tree, x: Samples, y: Tensor, real: Tensor | None, keys: Tensor
    ) -> tuple[list[Tensor], Tensor, Tree]:
        params = {name: state[name] for name in names}
        rest, where = lent_apart({name: x for name, x in state.items() if name not in params}, lent)
        axes: Any = (0, where, 0, 0, None if real is None else 0, 0)
        one: Any = grad_and_value(forward, has_aux=True) if names else forward
        out = _say_loop(lambda: vmap(one, in_dims=axes, randomness="error")(params, rest, x, y, real, keys))
        work.step.begin(None)
        if not names:
            return [], *out
        grads, (values, changed) = out
        return [grads[name] for name in names], values, changed

    return step


def _say_loop(run: Callable[[], Any]) -> Any:
    """Torch's refusal to stack, in words that help."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "randomness" not in str(error):
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"this model cannot be trained with clients stacked ({reason}): use path 'loop'"
            ) from error
        raise ConfigError(
            "the model draws random numbers outside nn.Dropout (F.dropout, or dropout inside LSTM or attention), which "
            "cannot be keyed by client when clients are stacked: use path 'loop'"
        ) from error


def refuse_unstackable(model: nn.Module) -> None:
    for name, layer in model.named_modules():
        foreign = isinstance(layer, _BatchNorm) and not isinstance(layer, LoopNorm)
        if foreign or (getattr(layer, "track_running_stats", False) and not isinstance(layer, _BatchNorm)):
            raise ConfigError(
                f"layer {name!r} ({type(layer).__name__}) keeps running statistics that padding would enter when "
                "clients are stacked: use path 'loop'"
            )
