"""Accuracy and loss of models on samples. Evaluating changes nothing: no model, no random state, no mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.core.errors import ConfigError
from sparing.core.threads import intra_op
from sparing.core.tree import Tree, rows
from sparing.task.clients import Clients
from sparing.task.dataset import prepared
from sparing.task.keyed import LoopNorm, StaticNorm
from sparing.task.losses import Loss, accuracy, each
from sparing.task.metrics import micro_aucs
from sparing.task.still import GATE, own_rng
from sparing.task.working import Working, check_names, gathered, load, signature, working_copy

BATCH = 512
WIDE = 2048
"""The same on a GPU, which takes about as long for more samples; not where the samples of a batch see each other."""


class Scores(NamedTuple):
    """What a model makes of n samples, on its device."""

    hits: Tensor  # [n] accuracy of each
    losses: Tensor  # [n]
    guesses: Tensor  # [n, C] probabilities where the output is a choice between classes, else [n, 0]
    y: Tensor  # [n, ...] their targets


def evaluate(
    model: nn.Module, loss: Loss, models: Tree, data: Clients, ids: Tensor, static: bool = False, stacked: bool = False
) -> dict[str, Tensor]:
    """Client k's model (leaves `[K, *shape]`, or `[1, *shape]` for all) on the samples of client ids[k].

    Gives accuracy, loss and auc, float64 `[K]`, and count, int64 `[K]`, on the CPU. A client without samples has NaN;
    so have accuracy and auc where targets are floats. `static`: BatchNorm uses batch statistics, as in training.

    Models of their own are run one by one, so that a row does not depend on the chunk, or `stacked`, all at once, where
    the last bits may; a model that looks at batch statistics always runs by itself. One model for everybody runs over
    all samples together, where they may as well.

    >>> data = Clients.of([([[1.0, 0.0]], [0]), ([[0.0, 1.0], [3.0, 0.0]], [1, 1])])
    >>> model, loss = nn.Linear(2, 2, bias=False), nn.CrossEntropyLoss(reduction="none")
    >>> evaluate(model, loss, {"weight": torch.eye(2)[None]}, data, torch.arange(2))["accuracy"]
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    check_names(model, models)
    ids, k = ids.cpu(), len(ids)
    count = data.count[ids]
    owner = torch.arange(k).repeat_interleave(count)
    with torch.no_grad(), GATE.side_by_side(), frozen(model, models, static) as work, own_rng(work.device), intra_op(1):
        alone = static or by_batches(work)
        if rows(models) == 1 and not alone:
            load(work, models, 0)
            place = (data.start[ids] - (count.cumsum(0) - count))[owner] + torch.arange(len(owner))
            found = scores(work, loss, data.x, data.y, place)
        elif stacked and not alone:
            found = stacked_scores(work, loss, models, data, ids)
        else:
            parts = []
            for i in count.nonzero()[:, 0].tolist():
                load(work, models, i)
                x, y = data.client(int(ids[i]))
                parts.append(scores(work, loss, x, y, torch.arange(len(x))))
            found = joined(parts)
        area = micro_aucs(found.guesses, found.y, owner.to(work.device, non_blocking=True), k)
        figures = torch.cat([found.hits.double(), found.losses.double(), area]).cpu()
    hits, losses, area = figures.split([len(owner), len(owner), k])
    right, lost = (torch.zeros(k, dtype=torch.float64).index_add_(0, owner, x) for x in (hits, losses))
    return {"accuracy": right / count, "loss": lost / count, "auc": area, "count": count}


def evaluate_all(
    model: nn.Module, loss: Loss, tree: Tree, x: Tensor, y: Tensor, static: bool = False
) -> dict[str, float]:
    """One model (leaves `[1, *shape]`) on one set of samples: accuracy, loss, auc and count.

    >>> out = evaluate_all(nn.Flatten(), nn.CrossEntropyLoss(reduction="none"), {}, torch.eye(2), torch.tensor([0, 0]))
    >>> out["accuracy"], out["count"]
    (0.5, 2)
    """
    check_names(model, tree)
    with torch.no_grad(), frozen(model, tree, static) as work, own_rng(work.device):
        load(work, tree, 0)
        found = scores(work, loss, x, y, torch.arange(len(x), device=x.device))
        area = micro_aucs(found.guesses, found.y, torch.zeros(len(x), dtype=torch.int64, device=work.device), 1)
        figures = torch.stack([found.hits.double().mean(), found.losses.double().mean(), area[0]])
    hit, lost, under = figures.tolist()
    return {"accuracy": hit, "loss": lost, "auc": under, "count": len(x)}


COPIES: "WeakKeyDictionary[nn.Module, list[tuple[tuple, Working]]]" = WeakKeyDictionary()
"""Frozen copies that nobody uses now, and what their models were like: making one takes milliseconds."""


@contextmanager
def frozen(model: nn.Module, tree: Tree, static: bool) -> Iterator[Working]:
    """A frozen copy, for the time being."""
    copies, now = COPIES.setdefault(model, []), (signature(model, device_of(tree)), static)
    known, work = copies.pop() if copies else (None, None)
    if work is None or known != now:
        work = frozen_copy(model, tree, static)
    yield work
    copies.append((now, work))


def frozen_copy(model: nn.Module, tree: Tree, static: bool) -> Working:
    work = working_copy(model, device_of(tree), stacked=False, static=static)
    work.module.eval()
    for layer in filter(by_batch, work.module.modules()):
        layer.train(isinstance(layer, LoopNorm))  # the same statistics, but torch refuses a single value elsewhere
    return work


def device_of(tree: Tree) -> torch.device:
    return next(iter(tree.values())).device if tree else torch.device("cpu")


def by_batches(work: Working) -> bool:
    """Whether what comes out depends on which samples stand in a batch."""
    return any(by_batch(layer) or isinstance(layer, StaticNorm) for layer in work.module.modules())


def by_batch(layer: nn.Module) -> bool:
    """Whether the samples of a batch see each other here even in evaluation: BatchNorm without running statistics."""
    return isinstance(layer, _BatchNorm) and layer.running_mean is None


def stacked_scores(work: Working, loss: Loss, models: Tree, data: Clients, ids: Tensor) -> Scores:
    """What `scores` gives, for K clients with models of their own, run together; short clients are padded, then cut."""
    count, k = data.count[ids], len(ids)
    width = max(int(count.max()), 1)
    column = torch.arange(width).expand(k, width)
    real = (column < count[:, None]).flatten().nonzero()[:, 0].to(work.device, non_blocking=True)
    places = (data.start[ids][:, None] + column.minimum((count - 1).clamp(min=0)[:, None])).to(data.x.device)
    run = vmap(lambda state, x: functional_call(work.module, state, (x,)))
    rows = {name: models[name].expand(k, *x.shape) for name, x in work.state.items()}
    parts = []
    for place in places.split(max(1, width_of(work) // k), dim=1):
        x = prepared(gathered(data.x, place.reshape(-1), work)).unflatten(0, place.shape)
        target = data.y.index_select(0, place.reshape(-1)).to(work.device)
        marks = scored(loss, run(rows, x).flatten(0, 1), target)
        parts.append([mark.unflatten(0, place.shape) for mark in marks])
    return Scores(*(torch.cat(part, dim=1).flatten(0, 1)[real] for part in zip(*parts, strict=True)))


def scores(work: Working, loss: Loss, x: Tensor, y: Tensor, places: Tensor) -> Scores:
    """Of the samples at these places.

    Batches are as equal as can be: with batch statistics, a last batch of one would say nothing.
    """
    parts = []
    for place in places.to(x.device).tensor_split(-(-len(places) // width_of(work)) or 1):
        if len(place):
            output = work.module(prepared(gathered(x, place, work)))
            parts.append(scored(loss, output, y.index_select(0, place).to(work.device)))
    return joined(parts)


def width_of(work: Working) -> int:
    """Samples in a batch, at most."""
    return WIDE if work.device.type == "cuda" and not by_batches(work) else BATCH


def scored(loss: Loss, output: Any, y: Tensor) -> Scores:
    if not isinstance(output, Tensor):
        raise ConfigError(
            f"in evaluation, what the model gives is of type {type(output).__name__}, and accuracy is taken of one "
            "tensor: let its forward give the tensor alone unless self.training"
        )
    plain = output.ndim == 2 and y.ndim == 1 and not y.is_floating_point()
    guesses = output.softmax(1) if plain else output.new_zeros(len(output), 0)
    return Scores(accuracy(output, y), each(loss, output, y), guesses, y)


def joined(parts: list[Scores]) -> Scores:
    if not parts:
        none = torch.zeros(0)
        return Scores(none, none, none, none)
    return Scores(*(torch.cat(part) for part in zip(*parts, strict=True)))
