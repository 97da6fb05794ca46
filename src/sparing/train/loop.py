"""The plain path, `loop`: one client after the other, for any nn.Module, with its own layers.

A client's result has the same bits whoever else is in the call, in which chunk and on how many threads, because nothing
it computes with is shared: keyed batches and dropout, one intra-op thread, its own batches in fresh memory, and a seed
of its own for whatever else in the model draws from torch's generator.
"""

import math
from collections.abc import Container
from functools import partial

import torch
from torch import Tensor

from sparing.core.errors import ConfigError
from sparing.core.threads import intra_op
from sparing.core.tree import Tree
from sparing.train.batches import counted_from
from sparing.train.call import PathCall, check_finite, diverged
from sparing.train.client_batches import ClientKeys, batch_keys, client_batches
from sparing.train.model_call import call_model
from sparing.train.optim import (
    beside_rows,
    factor_pairs,
    fresh_memory,
    recalled_memory,
    remember_velocities,
    update_params,
)
from sparing.train.pieces import batch_gradients, set_pieces
from sparing.train.precision import multiplying_on
from sparing.train.torch_rng import train_in_turn
from sparing.train.working_copy import WorkingCopy, load_row, save_row, trained_names, trained_params, working_copy


def train_loop(lesson: PathCall) -> tuple[Tree, Tensor]:
    """The models after training, `[K, *shape]`, and the reported losses `[K]`; `lesson.memory` is overwritten."""
    if lesson.precision == "bf16":
        raise ConfigError("path 'loop' trains in float32, but precision is bf16: use 'loop-fast' or 'implicit'")
    work, keys = working_copy(lesson.model, lesson.device, lesson.static), batch_keys(lesson)
    set_pieces(work, lesson.pieces)
    lent = lent_to_all(lesson)
    after, losses = rows_for(lesson, lent), []
    with torch.enable_grad(), multiplying_on(lesson.device, lesson.precision), intra_op(lesson.threads):
        for k in range(len(lesson.ctx.ids)):
            losses.append(_train_client(lesson, keys, work, after, k))
        check_finite(after, lesson)
    return after, torch.tensor(losses)


def lent_to_all(lesson: PathCall) -> set[str]:
    """Names of frozen weights that all clients share: nobody gets a row of its own."""
    named = lesson.model.named_parameters(remove_duplicate=False)
    return {name for name, p in named if not p.requires_grad and lesson.start[name].shape[0] == 1}


def rows_for(lesson: PathCall, lent: Container[str] = ()) -> Tree:
    """Room for every client's model; of what is lent, the rows are what it started from."""
    k = len(lesson.ctx.ids)
    return {
        name: lesson.start[name].expand(k, *x.shape)
        if name in lent
        else torch.empty(k, *x.shape, dtype=lesson.start[name].dtype, device=lesson.device)
        for name, x in lesson.model.state_dict().items()
    }


def _train_client(lesson: PathCall, keys: ClientKeys, work: WorkingCopy, after: Tree, k: int) -> float:
    """Client k's row is loaded, trained through all phases, and saved."""

    def train(seeded: bool) -> tuple[float, Tree]:
        load_row(work, lesson.start, k)
        loss, memory = 0.0, {name: rows[k : k + 1].clone() for name, rows in lesson.memory.items()}
        for number in range(len(lesson.local.phases)):
            loss = _train_phase(lesson, keys, work, k, number, memory, seeded)
        return loss, memory

    loss, memory = train_in_turn(lesson.model, lesson.device, train)
    save_row(work, after, k, lent_to_all(lesson))
    for name, x in memory.items():
        lesson.memory[name][k : k + 1] = x
    return loss


def _train_phase(
    lesson: PathCall, keys: ClientKeys, work: WorkingCopy, k: int, number: int, remembered: Tree, seeded: bool
) -> float:
    """Forward, loss, gradient, update for each batch of client k; its mean loss over the last epoch."""
    phase = lesson.local.phases[number]
    names = trained_names(work, phase)
    params, pairs = trained_params(work, names), factor_pairs(names)
    values = [p.detach() for p in params]
    beside = beside_rows(lesson.aside, phase, names, slice(k, k + 1), alone=True)
    memory = recalled_memory(fresh_memory(phase, values), names, remembered, slice(None))
    reported, run = ReportedLoss(lesson, k, number), partial(call_model, work.module)
    for t, (x, y) in enumerate(client_batches(lesson, keys, work, k, number, seeded)):
        loss, counted, grads = batch_gradients(run, work, lesson.loss, lesson.pieces, x, y, params)
        reported.add(t, loss, counted)
        update_params(phase, t, values, grads, beside, memory, pairs, stacked=False)
    remember_velocities(memory, names, remembered, slice(None))
    return reported.mean


class ReportedLoss:
    """The mean over the samples visited in the last epoch of a phase, or in all its steps where it counts steps; of
    sequences, over their tokens."""

    def __init__(self, lesson: PathCall, k: int, number: int) -> None:
        self.client, self.round, self.number = int(lesson.ctx.ids[k]), lesson.ctx.round, number
        self.phase = lesson.local.phases[number]
        self.begin = counted_from(self.phase, int(lesson.data.count[self.client]))
        self.total, self.visited = 0.0, 0.0

    def add(self, t: int, loss: Tensor, size: float) -> None:
        """Step t; a loss that left the finite world is refused."""
        value = float(loss.detach())
        if not math.isfinite(value):
            raise diverged(value, self.client, self.round, self.number, t, self.phase)
        if t >= self.begin:
            self.total, self.visited = self.total + value * size, self.visited + size

    @property
    def mean(self) -> float:
        return self.total / max(self.visited, 1)
