"""The batches of K clients side by side, for training that takes all of them through each step together."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.keys import Ctx, hashes
from sparing.core.later import doubt
from sparing.core.protocols import Phase
from sparing.task.batches import shuffle_keys
from sparing.task.clients import Clients
from sparing.task.keyed import drop_keys
from sparing.task.loop import diverged

WORDS = 1 << 23  # hashes sorted at once
FEW = 1 << 16  # hashes up to which launching work on a device costs more than doing it
LAST = (1 << 63) - 1
CPU = torch.device("cpu")


class Plan(NamedTuple):
    """The batches of one phase, clients in order of falling steps."""

    order: Tensor  # [K]: which row stands where
    alive: list[int]  # per step: how many clients train
    width: list[int]  # per step: the longest batch among them
    full: list[bool]  # per step: no batch is shorter than that
    places: Tensor  # [S, K, batch] in the flat samples
    real: Tensor  # [S, K, batch] bool
    keys: Tensor  # [S, K] of the dropout draws
    views: Tensor  # [S, K] keys of augmentation
    counts: Tensor  # [S, K] how many visited samples enter the reported loss


def plan_of(data: Clients, phase: Phase, number: int, ctx: Ctx, device: torch.device) -> Plan:
    """The same batches as `batches` gives each client.

    What Python needs to know follows from the clients' counts, on the CPU; shuffles and keys are worked out on the
    device. So where `ctx.ids` is on the CPU, nothing waits for a device. `order` and `counts` stay on the CPU.
    """
    ctx = ctx._replace(ids=ctx.here[0])
    n_K = data.count[ctx.ids]
    each_K = -(-n_K // phase.batch)  # batches an epoch
    steps_K = phase.epochs * each_K if phase.steps is None else torch.full_like(n_K, phase.steps)
    order = steps_K.argsort(descending=True, stable=True)
    shuffles = shuffle_keys(ctx, number, phase, n_K.tolist())[:, order]
    n_K, each_K, steps_K = n_K[order], each_K[order], steps_K[order]
    step = torch.arange(int(steps_K[0]))[:, None]
    size = (n_K - step % each_K * phase.batch).clamp(max=phase.batch).masked_fill(step >= steps_K, 0)
    width = size.amax(1)
    full = ((size == width[:, None]) | (size == 0)).all(1)
    begin_K = (phase.epochs - 1) * each_K if phase.steps is None else torch.zeros_like(n_K)
    words = int((-(-steps_K // each_K) * n_K).sum())
    places = visited(shuffles, n_K, each_K, steps_K, phase.batch, data.x.device if words > FEW else CPU)
    places += over(data.start[ctx.ids[order]], places.device)[:, None]
    keys = over(hashes(drop_keys(ctx, number)[order], len(step)).T, device)
    views = over(hashes(ctx.keys(f"augment/{number}")[order], len(step)).T, device) if data.augment else keys
    return Plan(
        order=order,
        alive=(size > 0).sum(1).tolist(),
        width=width.tolist(),
        full=full.tolist(),
        places=over(places, data.x.device),
        real=over(torch.arange(phase.batch) < size[..., None], device),
        keys=keys,
        views=views,
        counts=size.masked_fill(step < begin_K, 0),
    )


def in_order(plan: Plan) -> bool:
    """Whether the rows stand as in ctx.ids."""
    return plan.order.tolist() == list(range(len(plan.order)))


def visited(shuffles: Tensor, n_K: Tensor, each_K: Tensor, steps_K: Tensor, batch: int, device: torch.device) -> Tensor:
    """Sample numbers `[S, K, batch]`; places that a batch does not fill repeat its first sample."""
    epochs_K = -(-steps_K // each_K)
    first_K = epochs_K.cumsum(0) - epochs_K
    whose = torch.arange(len(n_K)).repeat_interleave(epochs_K)  # one row per client and epoch
    epoch = torch.arange(len(whose)) - first_K[whose]
    keys, counts = over(shuffles[epoch, whose], device), over(n_K[whose], device)
    longest, step = int(n_K.max()), torch.arange(int(steps_K[0]), device=device)[:, None]
    at_once = max(1, WORDS // longest)
    parts = zip(keys.split(at_once), counts.split(at_once), strict=True)
    orders = torch.cat([shuffled(some, count, longest) for some, count in parts])
    n_K, each_K, first_K, epochs_K = over(torch.stack([n_K, each_K, first_K, epochs_K]), device)
    row = first_K + torch.minimum(step // each_K, epochs_K - 1)
    begin = (step % each_K * batch)[..., None]
    place = begin + torch.arange(batch, device=device)
    return orders[row[..., None], torch.where(place < n_K[:, None], place, begin)]


def shuffled(keys: Tensor, counts: Tensor, longest: int) -> Tensor:
    """The samples of each row in the order of their words, `[R, longest]`; no sense beyond its count."""
    beyond = torch.arange(longest, device=keys.device) >= counts[:, None]
    return hashes(keys, longest).masked_fill_(beyond, LAST).argsort(dim=1, stable=True)


def over(x: Tensor, device: torch.device) -> Tensor:
    return x.to(device, non_blocking=True)


def reported(seen: Tensor, plan: Plan, phase: Phase, number: int, ctx: Ctx) -> Tensor:
    """The mean loss per client, back in the order of ctx.ids; refuses losses that left the finite world."""

    def judge(seen: Tensor) -> None:
        for t, place in (~seen.isfinite()).nonzero().tolist():
            client = int(ctx.here[0][int(plan.order[place])])
            raise diverged(float(seen[t, place]), client, ctx.round, number, t, phase)

    doubt(ctx.doubts, seen, judge)
    counts = over(plan.counts, seen.device)
    means = (seen.double() * counts).sum(0) / counts.sum(0)
    return means if in_order(plan) else means[over(plan.order.argsort(), seen.device)]
