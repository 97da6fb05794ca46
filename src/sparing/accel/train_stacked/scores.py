"""Evaluation of K clients' models at once (vmap)."""

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from sparing.core.tree import Tree
from sparing.data.clients import Clients
from sparing.data.dataset import to_network_input
from sparing.train.evaluate import Scores, scored_batch
from sparing.train.losses import Loss
from sparing.train.model_call import call_with_state
from sparing.train.working_copy import WorkingCopy, gathered_samples, samples_at_once


def stacked_scores(work: WorkingCopy, loss: Loss, models: Tree, data: Clients, ids: Tensor, keep: bool) -> Scores:
    """What K clients' models make of their samples, run together; short clients are padded, then cut."""
    count, k = data.count[ids], len(ids)
    width = max(int(count.max()), 1)
    column = torch.arange(width).expand(k, width)
    real = (column < count[:, None]).flatten().nonzero()[:, 0].to(work.device, non_blocking=True)
    places = (data.start[ids][:, None] + column.minimum((count - 1).clamp(min=0)[:, None])).to(data.x.device)
    run = vmap(lambda state, x: call_with_state(work.module, state, x))
    rows = {name: models[name].expand(k, *x.shape) for name, x in work.state.items()}
    parts = []
    for place in places.split(max(1, samples_at_once(work, data.x) // k), dim=1):
        x = to_network_input(gathered_samples(data.x, place.reshape(-1), work)).unflatten(0, place.shape)
        target = data.y.index_select(0, place.reshape(-1)).to(work.device)
        marks = scored_batch(loss, tree_map(lambda out: out.flatten(0, 1), run(rows, x)), target, keep)
        parts.append([mark.unflatten(0, place.shape) for mark in marks])
    return Scores(*(torch.cat(part, dim=1).flatten(0, 1)[real] for part in zip(*parts, strict=True)))
