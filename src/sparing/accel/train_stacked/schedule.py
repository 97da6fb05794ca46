"""The batches of K clients side by side, for training that takes all of them through each step together."""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import Ctx, few_keys
from sparing.core.errors import TrainingError
from sparing.core.keys import few_hashes, hashes
from sparing.core.method import Phase
from sparing.core.ops import place
from sparing.data.clients import Clients
from sparing.train.call import diverged
from sparing.train.keyed_layers import keys_told_apart
from sparing.train.losses import Loss, sample_weights

WORDS = 1 << 23  # hashes sorted at once
FEW = 1 << 13  # hashes up to which launching work on a device costs more than doing it
SMALL = 1 << 16  # visits up to which a frame is kept
LAST = (1 << 63) - 1


class StepTable(NamedTuple):
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


class _Frame(NamedTuple):
    """What of a table follows from the clients' counts alone; all on the CPU."""

    order: np.ndarray
    ordered: bool
    alive: list[int]
    width: list[int]
    full: list[bool]
    real: Tensor
    counts: Tensor
    epochs: int  # of the client that has the most
    n: np.ndarray  # [R] samples, of one row per client and epoch
    longest: int  # of these rows
    drawn: np.ndarray  # [R] by which of the keys [epochs, K] each is shuffled
    taken: np.ndarray  # [S, K, batch] places in these rows end to end; what a batch does not fill repeats its first


def step_table(data: Clients, phase: Phase, number: int, ctx: Ctx, device: torch.device) -> StepTable:
    """The same batches as `batches` gives each client; `order` and `counts` stay on the CPU."""
    table = step_table_here(data, phase, number, ctx, longest=int(data.count[ctx.ids].max()))
    places, keys = place(table.places, data.x.device), place(table.keys, device)
    views = place(table.views, device) if data.augment else keys
    return table._replace(places=places, real=place(table.real, device), keys=keys, views=views)


def step_table_here(data: Clients, phase: Phase, number: int, ctx: Ctx, longest: int) -> StepTable:
    """The same, before anything is brought to a device. A batch has room for the `longest` client, not for more.

    What Python needs to know follows from the clients' counts, on the CPU; so does nearly all else, but many samples
    are shuffled where they are. Nothing waits for a device, where the CPU knows who is in ctx.
    """
    who = ctx.ids.numpy()
    counts = tuple(data.count.numpy()[who].tolist())
    framed = _known_frame if sum(counts) * phase.epochs <= SMALL and phase.steps is None else _frame_of
    frame = framed(counts, min(phase.batch, longest), phase.epochs, phase.steps)
    tags = [f"shuffle/{number}/{epoch}" for epoch in range(frame.epochs)]
    words = few_keys(ctx, *tags, f"dropout/{number}", f"augment/{number}")
    shuffles, (drops, views) = words.reshape(-1)[frame.drawn], words[-2:]
    start = data.start.numpy()[who[frame.order]][:, None]
    if len(shuffles) * frame.longest <= (FEW if data.x.is_cuda else WORDS):
        places = torch.from_numpy(_visited(shuffles, frame) + start)
    else:
        places = _visited_there(shuffles, frame, data.x.device) + place(torch.from_numpy(start), data.x.device)
    keys = _step_keys(keys_told_apart(drops, who), frame)
    return StepTable(
        order=torch.from_numpy(frame.order),
        alive=frame.alive,
        width=frame.width,
        full=frame.full,
        places=places,
        real=frame.real,
        keys=keys,
        views=_step_keys(views, frame) if data.augment else keys,
        counts=frame.counts,
        ordered=frame.ordered,
    )


def _frame_of(counts: tuple[int, ...], batch: int, epochs: int, steps: int | None) -> _Frame:
    n_K = np.array(counts)
    each_K = -(-n_K // batch)  # batches an epoch
    steps_K = epochs * each_K if steps is None else np.full_like(n_K, steps)
    order = np.argsort(-steps_K, kind="stable")
    n_K, each_K, steps_K = n_K[order], each_K[order], steps_K[order]
    step = np.arange(steps_K[0])[:, None]
    begin = step % each_K * batch
    size = np.where(step < steps_K, np.minimum(n_K - begin, batch), 0)
    width = size.max(1)
    counted_K = (epochs - 1) * each_K if steps is None else np.zeros_like(n_K)
    epochs_K = -(-steps_K // each_K)
    first_K = epochs_K.cumsum() - epochs_K
    whose = np.repeat(np.arange(len(n_K)), epochs_K)
    place = begin[..., None] + np.arange(batch)
    place = np.where(place < n_K[:, None], place, begin[..., None])
    row, longest = first_K + np.minimum(step // each_K, epochs_K - 1), int(n_K.max())
    return _Frame(
        order=order,
        ordered=bool((order[1:] > order[:-1]).all()),
        alive=(size > 0).sum(1).tolist(),
        width=width.tolist(),
        full=((size == width[:, None]) | (size == 0)).all(1).tolist(),
        real=torch.from_numpy(np.arange(batch) < size[..., None]),
        counts=torch.from_numpy(np.where(step < counted_K, 0, size)),
        epochs=int(epochs_K.max()),
        n=n_K[whose],
        longest=longest,
        drawn=(np.arange(len(whose)) - first_K[whose]) * len(n_K) + order[whose],
        taken=row[..., None] * longest + place,
    )


_known_frame = lru_cache(maxsize=64)(_frame_of)
"""Clients with equally many samples have the same frame in every round."""


def _step_keys(keys: np.ndarray, frame: _Frame) -> Tensor:
    """One word for each step from every client's key: `[S, K]`."""
    return torch.from_numpy(few_hashes(keys[frame.order], len(frame.alive)).view(np.int64).T)


def _visited(keys: np.ndarray, frame: _Frame) -> np.ndarray:
    """Sample numbers `[S, K, batch]`, from the keys by which each row is shuffled: in the order of their words."""
    words = few_hashes(keys, frame.longest).view(np.int64)
    words[np.arange(frame.longest) >= frame.n[:, None]] = LAST
    return words.argsort(axis=1, kind="stable").take(frame.taken)


def _visited_there(keys: np.ndarray, frame: _Frame, device: torch.device) -> Tensor:
    """The same on a device, some rows at once."""
    at_once = max(1, WORDS // frame.longest)
    words, n = place(torch.from_numpy(keys.view(np.int64)), device), place(torch.from_numpy(frame.n), device)
    orders = [_shuffled(*some, frame.longest) for some in zip(words.split(at_once), n.split(at_once), strict=True)]
    return torch.cat(orders).take(place(torch.from_numpy(frame.taken), device))


def _shuffled(keys: Tensor, counts: Tensor, longest: int) -> Tensor:
    """The samples of each row in the order of their words, `[R, longest]`; no sense beyond its count."""
    beyond = torch.arange(longest, device=keys.device) >= counts[:, None]
    return hashes(keys, longest).masked_fill_(beyond, LAST).argsort(dim=1, stable=True)


def counted_in_tokens(table: StepTable, loss: Loss, y: Tensor) -> StepTable:
    """The table with what each step weighs in the reported loss, where samples do not all weigh the same."""
    if sample_weights(loss, y[:1]) is None:
        return table
    weights = [_step_weights(loss, y, *step) for step in zip(table.places, table.real, strict=True)]
    return table._replace(counts=torch.where(table.counts > 0, torch.stack(weights).cpu(), 0.0))


def _step_weights(loss: Loss, y: Tensor, places: Tensor, real: Tensor) -> Tensor:
    """Of one step, `[K]`."""
    weights = sample_weights(loss, y.index_select(0, place(places.flatten(), y.device)))
    assert weights is not None
    return (weights.view(places.shape).to(real.device) * real).sum(1)


def reported_losses(seen: Tensor, table: StepTable, phase: Phase, number: int, ctx: Ctx) -> Tensor:
    """The mean loss per client, back in the order of ctx.ids; refuses losses that left the finite world."""

    fine = seen.abs() < math.inf  # also false for NaN

    def first_diverged() -> TrainingError:
        t, at = (~fine).nonzero()[0].tolist()
        client = int(ctx.ids[int(table.order[at])])
        return diverged(float(seen[t, at]), client, ctx.round, number, t, phase)

    ctx.require(fine, first_diverged)
    counts = place(table.counts, seen.device)
    means = (seen.double() * counts).sum(0) / counts.sum(0).clamp(min=1)
    return means if table.ordered else means[place(table.order.argsort(), seen.device)]
