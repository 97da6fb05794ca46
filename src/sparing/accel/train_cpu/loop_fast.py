"""The path `loop-fast`: one client after the other as in `train.loop`, by a working copy that takes less time.

Channels stand last, chains of layers, convolutions and dense layers are recast, large layers under plain SGD move by
the factors of their gradient, and a CPU may multiply in bfloat16. Rows are as exact: a client has the same bits in any
chunk and on any number of threads, which differ from those of `loop` in rounding.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sparing.accel.bf16 import refuse_half_on_cuda
from sparing.accel.grown import Grown
from sparing.accel.train_cpu.fast_copy import FastCopy, fast_copy, load_fast_row, save_fast_row
from sparing.accel.train_cpu.outer_sgd import descend, held_layers, moving_by_factors
from sparing.core.threads import intra_op
from sparing.core.tree import Models, Tree
from sparing.data.inputs import Samples
from sparing.train.call import PathCall, check_finite
from sparing.train.client_batches import ClientKeys, batch_keys, client_batches
from sparing.train.loop import ReportedLoss, lent_to_all, rows_for
from sparing.train.losses import batch_mean, in_float32, sample_losses, sample_weights
from sparing.train.model_call import call_model
from sparing.train.optim import (
    beside_rows,
    factor_pairs,
    fresh_memory,
    recalled_memory,
    remember_velocities,
    update_params,
)
from sparing.train.pieces import WHOLE, batch_gradients, set_pieces
from sparing.train.precision import multiplying_on
from sparing.train.torch_rng import train_in_turn
from sparing.train.working_copy import trained_names, trained_params


def train_loop_fast(lesson: PathCall) -> tuple[Models, Tensor]:
    """The models after training and the reported losses `[K]`; `lesson.memory` is overwritten with what came of it."""
    refuse_half_on_cuda(lesson)
    fast, keys = fast_copy(lesson.model, lesson.device, lesson.static), batch_keys(lesson)
    set_pieces(fast.work, lesson.pieces)
    half = lesson.precision == "bf16"
    plain = all(x.dtype != torch.bool for x in fast.work.state.values())  # bools cannot be added to
    if half and plain and lesson.pieces == WHOLE:
        fast = fast._replace(held=held_layers(fast.outer, fast.work.state, lesson.local.phases))
    after = rows_for(lesson, () if fast.held else lent_to_all(lesson))
    with torch.enable_grad(), multiplying_on(lesson.device, lesson.precision), intra_op(lesson.threads):
        losses = torch.tensor([_train_client_fast(lesson, keys, fast, after, k) for k in range(len(lesson.ctx.ids))])
        check_finite(after, lesson)
    return Grown(lesson.start, after) if fast.held else after, losses


def _train_client_fast(lesson: PathCall, keys: ClientKeys, fast: FastCopy, after: Tree, k: int) -> float:
    """Train client k through all phases, write its row and what it remembers, and give its loss."""

    def train(seeded: bool) -> tuple[float, Tree]:
        load_fast_row(fast, lesson.start, k)
        loss, memory = 0.0, {name: rows[k : k + 1].clone() for name, rows in lesson.memory.items()}
        for number in range(len(lesson.local.phases)):
            loss = _train_phase_fast(lesson, keys, fast, k, number, memory, seeded)
        return loss, memory

    loss, memory = train_in_turn(lesson.model, lesson.device, train)
    save_fast_row(fast, lesson.start, after, k, lent_to_all(lesson))
    for name, x in memory.items():
        lesson.memory[name][k : k + 1] = x
    return loss


def _train_phase_fast(
    lesson: PathCall, keys: ClientKeys, fast: FastCopy, k: int, number: int, remembered: Tree, seeded: bool
) -> float:
    phase, work, half = lesson.local.phases[number], fast.work, lesson.precision == "bf16"
    names = trained_names(work, phase)
    params, pairs = trained_params(work, names), factor_pairs(names)
    values, whole = [p.detach() for p in params], lesson.pieces == WHOLE
    layers = moving_by_factors(fast.outer, phase) if whole else []
    beside = beside_rows(lesson.aside, phase, names, slice(k, k + 1), alone=True)
    memory = recalled_memory(fresh_memory(phase, values), names, remembered, slice(None))
    reported = ReportedLoss(lesson, k, number)

    def run(x: Samples) -> Any:
        with _halved(half):
            output = call_model(work.module, x)
        return in_float32(output) if half else output

    for t, (x, y) in enumerate(client_batches(lesson, keys, work, k, number, seeded)):
        if layers:
            weights = sample_weights(lesson.loss, y)
            loss = batch_mean(sample_losses(lesson.loss, run(x), y), weights)
            reported.add(t, loss, len(y) if weights is None else float(weights.sum()))
            descend(loss, params, layers, phase.optimiser.lr)
            continue
        loss, counted, grads = batch_gradients(run, work, lesson.loss, lesson.pieces, x, y, params)
        reported.add(t, loss, counted)
        update_params(phase, t, values, grads, beside, memory, pairs, stacked=False)
    remember_velocities(memory, names, remembered, slice(None))
    return reported.mean


def _halved(half: bool) -> AbstractContextManager[Any]:
    """On a CPU: factors of convolutions and products are in bfloat16; the rest is as torch's autocast has it."""
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if half else nullcontext()
