"""Local training of a chunk of clients on a GPU by a `Recording`: which one, and who may take part."""

import threading
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparing.core.keys import Ctx
from sparing.core.protocols import Local, Phase
from sparing.core.tree import Tree
from sparing.task.clients import Clients
from sparing.task.losses import Loss
from sparing.task.optim import is_plain
from sparing.task.recording import Played, Recording
from sparing.task.schedule import Plan, plan_of, reported

KEPT = 8
"""Recordings kept for a model."""


def can_capture(local: Local, start: Tree) -> bool:
    """Whether all that a step does can be replayed: SGD in float32 on CUDA, steered by nothing from the side."""
    plain = all(p.optimiser == "sgd" and not p.prox and not p.correct and not p.holds for p in local.phases)
    here = all(x.is_cuda and (x.dtype == torch.float32 or not x.is_floating_point()) for x in start.values())
    return plain and here and len(start) > 0 and find_spec("triton") is not None


def captured(
    model: nn.Module, loss: Loss, data: Clients, local: Local, start: Tree, ctx: Ctx, device: torch.device,
    precision: str,
) -> tuple[Played, Tensor] | None:  # fmt: skip
    """The last phase as it was played and the reported losses `[K]`; None where clients differ too much to train in
    step."""
    plans = [plan_of(data, phase, number, ctx, device) for number, phase in enumerate(local.phases)]
    if not all(in_step(model, phase, plan) for phase, plan in zip(local.phases, plans, strict=True)):
        return None
    played, losses, state = None, torch.zeros(len(ctx.ids)), start
    for number, (phase, plan) in enumerate(zip(local.phases, plans, strict=True)):
        state = state if played is None else state | dict(played.after)
        with TURN:
            played = recording(model, loss, data, local, phase, plan, state, device, precision).play(state, plan)
        losses = reported(played.losses, plan, phase, number, ctx)
    return None if played is None else (played, losses)


def in_step(model: nn.Module, phase: Phase, plan: Plan) -> bool:
    """Whether those who have finished early can stay in the batch: all finish together, or zeros move nobody."""
    even = all(m == len(plan.order) for m in plan.alive)
    return even or (
        is_plain(phase) and not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())
    )


RECORDS: "WeakKeyDictionary[nn.Module, list[tuple[Any, Recording]]]" = WeakKeyDictionary()
TURN = threading.Lock()
"""A recording has one place for everything, so it plays for one caller at a time."""


def recording(
    model: nn.Module, loss: Loss, data: Clients, local: Local, phase: Phase, plan: Plan, state: Tree,
    device: torch.device, precision: str,
) -> Recording:  # fmt: skip
    """The smallest that has room and does not waste it, made if there is none yet."""
    known = RECORDS.setdefault(model, [])
    steps, k = len(plan.alive), len(plan.order)
    even = all(plan.full) and set(plan.width) == {plan.places.shape[2]} and plan.alive[-1] == k
    shared = tuple(name for name, x in state.items() if x.shape[0] == 1)
    key = (loss, data, phase, local.buffers, even, plan.places.shape[2], shared, device, precision)
    alike = [record for other, record in known if other == key]
    fits = [r for r in alike if k <= r.k <= roomy(k) and steps <= r.steps <= roomy(steps)]
    if fits:
        return min(fits, key=lambda record: (record.k, record.steps))
    if alike:  # they come in different numbers
        k, steps = roomy(k), roomy(steps)
    while len(known) >= KEPT:
        known.pop(0)
    record = Recording(
        model, loss, data, phase, local.buffers == "static", plan, k, steps, not even, state, device, precision
    )
    known.append((key, record))
    return record


def roomy(n: int) -> int:
    """Rounded up a little, so that a few recordings serve all clients.

    >>> [roomy(n) for n in (1, 5, 9, 17, 100)]
    [1, 5, 10, 20, 112]
    """
    unit = 1 << max(0, n.bit_length() - 3)
    return -(-n // unit) * unit
