"""The batches of K clients side by side, for training that takes all of them through each step together."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.keys import Ctx, hashes, mix, mix_few
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
    ordered: bool  # the rows stand as in ctx.ids


class Frame(NamedTuple):
    """What of a plan follows from the clients' counts alone; all on the CPU."""

    order: Tensor
    ordered: bool
    alive: list[int]
    width: list[int]
    full: list[bool]
    real: Tensor
    counts: Tensor
    n: Tensor  # [R] samples, of one row per client and epoch
    epoch: Tensor  # [R] which epoch that is
    whose: Tensor  # [R] and whose, as a place in the order
    row: Tensor  # [S, K, 1] which of these rows a batch is taken from
    place: Tensor  # [S, K, batch] and where; places that a batch does not fill repeat its first sample


def plan_of(data: Clients, phase: Phase, number: int, ctx: Ctx, device: torch.device) -> Plan:
    """The same batches as `batches` gives each client.

    What Python needs to know follows from the clients' counts, on the CPU; shuffles and keys are worked out on the
    device, unless they are few. So where `ctx.ids` is on the CPU, nothing waits for a device. `order` and `counts` stay
    on the CPU.
    """
    ctx = ctx._replace(ids=ctx.here[0])
    counts = tuple(data.count[ctx.ids].tolist())
    framed = known_frame if sum(counts) * phase.epochs <= FEW and phase.steps is None else frame_of
    frame = framed(counts, phase.batch, phase.epochs, phase.steps)
    order = frame.order
    shuffles = shuffle_keys(ctx, number, phase, counts)
    there = data.x.device if int(frame.n.sum()) > FEW else CPU
    words = over(shuffles[frame.epoch, order[frame.whose]], there)
    places = visited(words, frame, there)
    places += over(data.start[ctx.ids[order]], there)[:, None]
    keys = over(hashes(drop_keys(ctx, number)[order], len(frame.alive), scramble=mix_few).T, device)
    views = over(hashes(ctx.keys(f"augment/{number}")[order], len(keys)).T, device) if data.augment else keys
    return Plan(
        order=order,
        alive=frame.alive,
        width=frame.width,
        full=frame.full,
        places=over(places, data.x.device),
        real=over(frame.real, device),
        keys=keys,
        views=views,
        counts=frame.counts,
        ordered=frame.ordered,
    )


def frame_of(counts: tuple[int, ...], batch: int, epochs: int, steps: int | None) -> Frame:
    n_K = torch.tensor(counts)
    each_K = -(-n_K // batch)  # batches an epoch
    steps_K = epochs * each_K if steps is None else torch.full_like(n_K, steps)
    order = steps_K.argsort(descending=True, stable=True)
    n_K, each_K, steps_K = n_K[order], each_K[order], steps_K[order]
    step = torch.arange(int(steps_K[0]))[:, None]
    size = (n_K - step % each_K * batch).clamp(max=batch).masked_fill(step >= steps_K, 0)
    width = size.amax(1)
    begin_K = (epochs - 1) * each_K if steps is None else torch.zeros_like(n_K)
    epochs_K = -(-steps_K // each_K)
    first_K = epochs_K.cumsum(0) - epochs_K
    whose = torch.arange(len(n_K)).repeat_interleave(epochs_K)
    begin = (step % each_K * batch)[..., None]
    place = begin + torch.arange(batch)
    return Frame(
        order=order,
        ordered=bool((order == torch.arange(len(order))).all()),
        alive=(size > 0).sum(1).tolist(),
        width=width.tolist(),
        full=((size == width[:, None]) | (size == 0)).all(1).tolist(),
        real=torch.arange(batch) < size[..., None],
        counts=size.masked_fill(step < begin_K, 0),
        n=n_K[whose],
        epoch=torch.arange(len(whose)) - first_K[whose],
        whose=whose,
        row=(first_K + torch.minimum(step // each_K, epochs_K - 1))[..., None],
        place=torch.where(place < n_K[:, None], place, begin),
    )


known_frame = lru_cache(maxsize=64)(frame_of)
"""Clients with equally many samples have the same frame in every round."""


def visited(keys: Tensor, frame: Frame, device: torch.device) -> Tensor:
    """Sample numbers `[S, K, batch]`, from the words by which each row is shuffled."""
    longest = int(frame.n.max())
    at_once = max(1, WORDS // longest)
    parts = zip(keys.split(at_once), over(frame.n, device).split(at_once), strict=True)
    orders = torch.cat([shuffled(some, count, longest) for some, count in parts])
    return orders[over(frame.row, device), over(frame.place, device)]


def shuffled(keys: Tensor, counts: Tensor, longest: int) -> Tensor:
    """The samples of each row in the order of their words, `[R, longest]`; no sense beyond its count."""
    beyond = torch.arange(longest, device=keys.device) >= counts[:, None]
    scramble = mix_few if keys.device == CPU and len(keys) * longest <= FEW else mix
    return hashes(keys, longest, scramble=scramble).masked_fill_(beyond, LAST).argsort(dim=1, stable=True)


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
    return means if plan.ordered else means[over(plan.order.argsort(), seen.device)]
