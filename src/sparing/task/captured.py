"""Local training of a chunk of clients on a GPU by a `Recording`: which one, and who may take part."""

import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparing.core.gpu import found
from sparing.core.keys import Ctx
from sparing.core.protocols import Local, Phase
from sparing.core.tree import Tree
from sparing.task.clients import Clients
from sparing.task.losses import Loss
from sparing.task.recording import Played, Recording
from sparing.task.schedule import Plan, planned, reported

KEPT, AMPLE = 8, 4
"""Recordings kept for a model; how many times the room that is needed, in clients and in steps, one may have."""


def can_capture(local: Local, start: Tree) -> bool:
    """Whether all that a step does can be replayed: SGD in float32 on CUDA, steered by nothing from the side."""
    plain = all(p.optimiser == "sgd" and not p.prox and not p.correct and not p.holds for p in local.phases)
    here = all(
        x.is_cuda and x.dtype != torch.bool and (x.dtype == torch.float32 or not x.is_floating_point())
        for x in start.values()
    )
    return plain and here and len(start) > 0 and found()


def captured(
    model: nn.Module, loss: Loss, data: Clients, local: Local, start: Tree, ctx: Ctx, device: torch.device,
    precision: str,
) -> tuple[Played, Tensor] | None:  # fmt: skip
    """The last phase as it was played and the reported losses `[K]`; None where clients differ too much to train in
    step."""
    longest = int(data.count.max())  # of all clients: a recording has one width, and chunks should share it
    plans = [planned(data, phase, number, ctx, longest) for number, phase in enumerate(local.phases)]
    if not all(in_step(model, plan) for plan in plans):
        return None
    played, losses, state = None, torch.zeros(len(ctx.ids)), start
    for number, (phase, plan) in enumerate(zip(local.phases, plans, strict=True)):
        state = state if played is None else state | dict(played.after)
        with TURN:
            played = recording(model, loss, data, local, phase, plan, state, device, precision).play(state, plan)
            losses = reported(played.losses, plan._replace(counts=played.counts), phase, number, ctx)
    return None if played is None else (played, losses)


def in_step(model: nn.Module, plan: Plan) -> bool:
    """Whether those who have finished early can stay in the batch: all finish together, or no statistics move."""
    even = plan.alive[-1] == plan.order.shape[0]
    return even or not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())


RECORDS: "WeakKeyDictionary[nn.Module, list[tuple[Any, Recording]]]" = WeakKeyDictionary()
TURN = threading.Lock()
"""A recording has one place for everything, so it plays for one caller at a time."""


def recording(
    model: nn.Module, loss: Loss, data: Clients, local: Local, phase: Phase, plan: Plan, state: Tree,
    device: torch.device, precision: str,
) -> Recording:  # fmt: skip
    """The smallest that has room, made if there is none yet.

    The first is made to measure. Where clients come in different numbers, one made later has more room than those
    before it, so that there are soon enough: room that is not needed costs some time on the GPU, recording far more.
    """
    known = RECORDS.setdefault(model, [])
    steps, k = len(plan.alive), plan.order.shape[0]
    even = all(plan.full) and set(plan.width) == {plan.places.shape[2]} and plan.alive[-1] == k
    shared = tuple(name for name, x in state.items() if x.shape[0] == 1)
    key = (loss, data, phase, local.buffers, plan.places.shape[2], shared, device, precision)
    alike = [record for other, record in known if other == key and (even or record.real is not None)]
    alike = [record for record in alike if record.k <= AMPLE * k and record.steps <= AMPLE * steps]
    fits = [record for record in alike if k <= record.k and steps <= record.steps]
    if fits:
        record = min(fits, key=lambda one: (one.k, one.real is not None, one.steps))
        known.sort(key=lambda one: one[1] is record)  # what was used last stands last
        return record
    k, steps = roomy(k, [one.k for one in alike]), roomy(steps, [one.steps for one in alike])
    del known[: -(KEPT - 1)]
    record = Recording(
        model, loss, data, phase, local.buffers == "static", plan, k, steps, not even, state, device, precision
    )
    known.append((key, record))
    return record


def roomy(n: int, before: list[int]) -> int:
    """Room for n, with some to spare where it is more than there was before.

    >>> roomy(12, []), roomy(14, [12]), roomy(10, [12, 18])
    (12, 18, 18)
    """
    most = max(before, default=n)
    return most if n <= most else -(-n * 5 // 4)
