"""Local training one client at a time: row-exact, for any nn.Module.

A client's result has the same bits whoever else is in the call, in which chunk and on how many threads, because
nothing it computes with is shared: keyed batches and dropout, one intra-op thread, its own batches gathered into
fresh (hence equally aligned) memory, and a seed of its own for whatever else in the model draws from torch's RNG.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparing.core.errors import TrainingError
from sparing.core.keys import Ctx, few_hashes, hashes
from sparing.core.protocols import Local, Phase
from sparing.core.tree import Grown, Trained, Tree
from sparing.task.augment import augmented
from sparing.task.batches import batches, counted_from, shuffle_keys
from sparing.task.clients import Clients
from sparing.task.dataset import prepared
from sparing.task.keyed import drop_keys
from sparing.task.losses import Loss, each, in_float32
from sparing.task.optim import Aside, factor_pairs, fresh, keep, kept, rows_of, update
from sparing.task.outer import descend, hold, ready
from sparing.task.precision import halved
from sparing.task.still import DRAWING, GATE, own_rng, seed_all
from sparing.task.working import Working, gathered, load, save, save_added, trained, working_copy

SEED_BITS = (1 << 63) - 1


class Job(NamedTuple):
    """All that is the same for every client of a call."""

    loss: Loss
    data: Clients
    local: Local
    start: Tree
    ctx: Ctx
    ids: list[int]
    device: torch.device
    shuffles: list[Tensor]  # per phase [epochs, K]
    drops: list[Tensor]  # per phase [K]: keys of dropout
    views: list[Tensor]  # per phase [K]: keys of augmentation
    memory: Tree  # velocities kept between rounds, overwritten
    aside: Aside
    half: bool  # whether forwards are in bfloat16


def loop(
    model: nn.Module, loss: Loss, data: Clients, local: Local, start: Tree, ctx: Ctx, device: torch.device,
    memory: Tree, aside: Aside, half: bool = False,
) -> tuple[Trained, Tensor]:  # fmt: skip
    """The models after training and the reported losses `[K]`; `memory` is overwritten with what came of it."""
    ids = ctx.ids.tolist()
    counts = data.count[ctx.ids.cpu()].tolist()
    shuffles = [shuffle_keys(ctx, i, phase, counts) for i, phase in enumerate(local.phases)]
    drops = [drop_keys(ctx, i) for i in range(len(local.phases))]
    views = [ctx.keys(f"augment/{i}") for i in range(len(local.phases))]
    job = Job(loss, data, local, start, ctx, ids, device, shuffles, drops, views, memory, aside, half)
    after = {
        name: torch.empty(len(ids), *x.shape, dtype=start[name].dtype, device=device)
        for name, x in model.state_dict().items()
    }
    work = working_copy(model, device, stacked=False, static=local.buffers == "static")
    if half and all(x.dtype != torch.bool for x in work.state.values()):  # bools cannot be added to
        work = work._replace(held=hold(work.outer, work.state, local.phases))
    losses = torch.tensor([train_in_turn(job, model, work, after, k) for k in range(len(ids))])
    return Grown(start, after) if work.held else after, losses


def train_in_turn(job: Job, model: nn.Module, work: Working, after: Tree, k: int) -> float:
    """Client k, while other threads may train others, unless the model is seen drawing from torch's generator.

    That is one for the whole process, so clients drawing from it side by side would disturb each other.
    """
    loss, memory = 0.0, {}
    if job.device.type == "cpu" and model not in DRAWING:
        with GATE.side_by_side():
            try:
                loss, memory = train_one(job, work, after, k, seeded=False)
            except TrainingError:
                if not GATE.drawn():
                    raise
            if GATE.drawn():
                DRAWING.add(model)
    if job.device.type != "cpu" or model in DRAWING:
        with GATE.alone(), own_rng(job.device):
            loss, memory = train_one(job, work, after, k, seeded=True)
    for name, x in memory.items():
        job.memory[name][k : k + 1] = x
    return loss


def train_one(job: Job, work: Working, after: Tree, k: int, seeded: bool) -> tuple[float, Tree]:
    """Train client k through all phases, write its row, give its loss and what it remembers, `[1, ...]`."""
    x, y = job.data.client(job.ids[k])
    load(work, job.start, k)
    loss, memory = 0.0, {name: row[k : k + 1].clone() for name, row in job.memory.items()}
    with torch.enable_grad():
        for number, phase in enumerate(job.local.phases):
            loss = train_phase(job, work, phase, number, k, x, y, memory, seeded)
    if work.held:
        save_added(work, job.start, after, k)
    else:
        save(work, after, k)
    return loss, memory


def train_phase(
    job: Job, work: Working, phase: Phase, number: int, k: int, x: Tensor, y: Tensor, remembered: Tree, seeded: bool
) -> float:
    names = trained(work, phase)
    params = [work.state[name] for name in names]
    for name in work.params:
        work.state[name].requires_grad_(name in names)
    values, layers = [p.detach() for p in params], ready(work.outer, phase)
    aside = rows_of(job.aside, phase, names, slice(k, k + 1), alone=True)
    memory = kept(fresh(phase, values), names, remembered, slice(None))
    pairs = factor_pairs(names)
    table = batches(job.shuffles[number][:, k], phase, len(y))
    keys = few_hashes(job.drops[number][k : k + 1].cpu().numpy().view(np.uint64), len(table))[0].view(np.int64).tolist()
    views = hashes(job.views[number][k : k + 1].to(job.device), len(table)) if job.data.augment else None
    begin, total, visited = counted_from(phase, len(y)), 0.0, 0
    sizes = (table >= 0).sum(1).tolist()
    table = table.to(x.device)
    for t, (row, size) in enumerate(zip(table, sizes, strict=True)):
        key = keys[t]
        if seeded:
            seed_all(key & SEED_BITS, job.device)
        work.step.begin(key if job.device.type == "cpu" else torch.tensor(key, device=job.device))
        batch = row[:size]
        samples = prepared(gathered(x, batch, work))
        if views is not None:
            samples = augmented(samples[None], views[:, t], job.data.augment)[0]
        with halved(job.half):
            output = work.module(samples)
        loss = each(
            job.loss, in_float32(output) if job.half else output, y.index_select(0, batch).to(job.device)
        ).mean()
        value = float(loss.detach())
        if not math.isfinite(value):
            raise diverged(value, job.ids[k], job.ctx.round, number, t, phase)
        if layers:
            descend(loss, params, layers, phase.lr)
        else:
            update(phase, t, values, gradients(loss, params), aside, memory, pairs, stacked=False)
        if t >= begin:
            total, visited = total + value * size, visited + size
    keep(memory, names, remembered, slice(None))
    return total / visited


def gradients(loss: Tensor, params: list[Tensor]) -> list[Tensor]:
    """Zeros for a parameter that the loss does not depend on."""
    if not params or not loss.requires_grad:
        return [torch.zeros_like(p) for p in params]
    found = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    return [g.to_dense() if g.is_sparse else g for g in found]


def diverged(value: float, client: int, round: int, phase: int, step: int, at: Phase) -> TrainingError:
    return TrainingError(
        f"client {client}, round {round}: the training loss became {value} at step {step + 1} of phase {phase + 1} "
        f"(lr {at.lr:g}, clip {at.clip}): lower lr or set clip"
    )
