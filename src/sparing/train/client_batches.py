"""One client's batches, in order, with all that is drawn for each of its steps: the same whoever else is trained."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.keys import few_hashes, hashes
from sparing.data.augment import augment_batch
from sparing.data.dataset import to_network_input
from sparing.data.inputs import Samples
from sparing.train.batches import batch_table, shuffle_keys
from sparing.train.call import PathCall
from sparing.train.keyed_layers import dropout_keys
from sparing.train.torch_rng import seed_torch
from sparing.train.working_copy import WorkingCopy, gathered_samples

_SEED_BITS = (1 << 63) - 1


class ClientKeys(NamedTuple):
    """What the clients of a lesson draw from."""

    shuffles: list[Tensor]  # per phase [epochs, K]
    dropouts: list[Tensor]  # per phase [K]
    views: list[Tensor]  # per phase [K]: of augmentation


def batch_keys(lesson: PathCall) -> ClientKeys:
    ctx, phases = lesson.ctx, lesson.local.phases
    counts = lesson.data.count[ctx.ids].tolist()
    return ClientKeys(
        [shuffle_keys(ctx, i, phase, counts) for i, phase in enumerate(phases)],
        [dropout_keys(ctx, i) for i in range(len(phases))],
        [ctx.keys(f"augment/{i}") for i in range(len(phases))],
    )


def client_batches(
    lesson: PathCall, keys: ClientKeys, work: WorkingCopy, k: int, number: int, seeded: bool
) -> Iterator[tuple[Samples, Tensor]]:
    """Samples and targets of client k's steps in phase `number`.

    Before each, dropout is given the step's key; `seeded`: torch's generator is seeded with it too. Samples are
    gathered into fresh, hence equally aligned, memory.
    """
    x, y = lesson.data.client(int(lesson.ctx.ids[k]))
    device, chosen = lesson.device, lesson.data.augment
    table = batch_table(keys.shuffles[number][:, k], lesson.local.phases[number], len(y))
    sizes = (table >= 0).sum(1).tolist()
    drops = few_hashes(keys.dropouts[number][k : k + 1].cpu().numpy().view(np.uint64), len(table))[0].view(np.int64)
    views = hashes(keys.views[number][k : k + 1].to(device), len(table)) if chosen else None
    work.step.seeded = seeded
    for t, (row, size, key) in enumerate(zip(table.to(x.device), sizes, drops.tolist(), strict=True)):
        if seeded:
            seed_torch(key & _SEED_BITS, device)
        work.step.begin(key if device.type == "cpu" else torch.tensor(key, device=device))
        samples = to_network_input(gathered_samples(x, row[:size], work))
        if views is not None:
            assert isinstance(samples, Tensor)  # `Clients` refuses to augment anything else
            samples = augment_batch(samples[None], views[:, t], chosen)[0]
        yield samples, y.index_select(0, row[:size]).to(device)
