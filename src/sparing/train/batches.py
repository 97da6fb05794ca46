"""Which samples a client visits at which step: keyed by client, so nobody else's presence changes its batches."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sparing.core.context import Ctx, few_keys
from sparing.core.keys import hashes
from sparing.core.method import Phase


def phase_steps(phase: Phase, counts: Sequence[int]) -> list[int]:
    """How many batches each client trains on in this phase: `epochs` times round its samples, or `steps`."""
    if phase.steps is not None:
        return [phase.steps] * len(counts)
    return [phase.epochs * _batches_per_epoch(phase, n) for n in counts]


def _batches_per_epoch(phase: Phase, n: int) -> int:
    return -(-n // phase.batch)


def shuffle_keys(ctx: Ctx, number: int, phase: Phase, counts: Sequence[int]) -> Tensor:
    """The keys by which each epoch of phase `number` is shuffled: `[epochs, K]`."""
    steps = phase_steps(phase, counts)
    epochs = max(-(-s // _batches_per_epoch(phase, n)) for s, n in zip(steps, counts, strict=True))
    return torch.from_numpy(few_keys(ctx, *(f"shuffle/{number}/{epoch}" for epoch in range(epochs))).view(np.int64))


def batch_table(keys: Tensor, phase: Phase, n: int) -> Tensor:
    """One client's batches, in order: `[S, batch]` sample numbers, -1 where an epoch's last batch is short.

    No batch has more places than the client has samples.

    `keys [epochs or more]` are the client's shuffle keys. In `steps` mode it walks on through reshuffled epochs.

    >>> table = batch_table(torch.tensor([7, 8]), Phase(epochs=2, batch=2), n=3)
    >>> table.shape, table[1].tolist()[1], sorted(table[:2].flatten().tolist())
    (torch.Size([4, 2]), -1, [-1, 0, 1, 2])
    """
    (steps,), each = phase_steps(phase, [n]), _batches_per_epoch(phase, n)
    order = hashes(keys[: -(-steps // each)], n).argsort(dim=1, stable=True)
    width = min(phase.batch, n)
    table = torch.full((len(order), each * width), -1)
    table[:, :n] = order
    return table.view(-1, width)[:steps]


def counted_from(phase: Phase, n: int) -> int:
    """The first step whose loss is reported: the last epoch's in `epochs` mode, all of them in `steps` mode."""
    return 0 if phase.steps is not None else (phase.epochs - 1) * _batches_per_epoch(phase, n)
