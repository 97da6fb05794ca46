"""Accuracy and loss of models on samples. Evaluating changes nothing: no model, no random state, no mode."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.core.threads import intra_op
from sparing.core.tree import Tree, rows
from sparing.task.clients import Clients
from sparing.task.dataset import prepared
from sparing.task.keyed import LoopNorm
from sparing.task.losses import Loss, accuracy, each
from sparing.task.metrics import micro_auc
from sparing.task.still import GATE, own_rng
from sparing.task.working import Working, check_names, gathered, load, working_copy

BATCH = 512


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
    right, lost, area = torch.zeros(3, k, dtype=torch.float64)
    work = frozen_copy(model, models, static)
    with torch.no_grad(), GATE.side_by_side(), own_rng(work.device), intra_op(1):
        if rows(models) == 1 and not static and not any(map(by_batch, work.module.modules())):
            load(work, models, 0)
            owner = torch.arange(k).repeat_interleave(count)
            place = (data.start[ids] - (count.cumsum(0) - count))[owner] + torch.arange(len(owner))
            hits, losses, guesses = scores(work, loss, data.x, data.y, place)
            right.index_add_(0, owner, hits)
            lost.index_add_(0, owner, losses)
            parts = zip(guesses.split(count.tolist()), data.y.cpu()[place].split(count.tolist()), strict=True)
            area = torch.tensor([micro_auc(guess, y) for guess, y in parts], dtype=torch.float64)
        elif stacked and not static and not any(map(by_batch, work.module.modules())):
            for i, (hits, losses, guesses) in enumerate(stacked_scores(work, loss, models, data, ids)):
                y = data.client(int(ids[i]))[1].cpu()
                right[i], lost[i], area[i] = hits.sum(), losses.sum(), micro_auc(guesses, y)
        else:
            for i, n in enumerate(count.tolist()):
                load(work, models, i)
                x, y = data.client(int(ids[i]))
                hits, losses, guesses = scores(work, loss, x, y, torch.arange(n))
                right[i], lost[i], area[i] = hits.sum(), losses.sum(), micro_auc(guesses, y.cpu())
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
    work = frozen_copy(model, tree, static)
    with torch.no_grad(), own_rng(work.device):
        load(work, tree, 0)
        hits, losses, guesses = scores(work, loss, x, y, torch.arange(len(x)))
    area = micro_auc(guesses, y.cpu())
    return {"accuracy": float(hits.mean()), "loss": float(losses.mean()), "auc": area, "count": len(x)}


def frozen_copy(model: nn.Module, tree: Tree, static: bool) -> Working:
    device = next(iter(tree.values())).device if tree else torch.device("cpu")
    work = working_copy(model, device, stacked=False, static=static)
    work.module.eval()
    for layer in filter(by_batch, work.module.modules()):
        layer.train(isinstance(layer, LoopNorm))  # the same statistics, but torch refuses a single value elsewhere
    return work


def by_batch(layer: nn.Module) -> bool:
    """Whether the samples of a batch see each other here even in evaluation: BatchNorm without running statistics."""
    return isinstance(layer, _BatchNorm) and layer.running_mean is None


def stacked_scores(
    work: Working, loss: Loss, models: Tree, data: Clients, ids: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """What `scores` gives, for K clients with models of their own, run together; short clients are padded, then cut."""
    count, k = data.count[ids], len(ids)
    width = max(int(count.max()), 1)
    column = torch.arange(width).expand(k, width).minimum((count - 1).clamp(min=0)[:, None])
    places = (data.start[ids][:, None] + column).to(data.x.device)
    run = vmap(lambda state, x: functional_call(work.module, state, (x,)))
    rows = {name: models[name].expand(k, *x.shape) for name, x in work.state.items()}
    parts = []
    for place in places.split(max(1, BATCH // k), dim=1):
        x = prepared(gathered(data.x, place.reshape(-1), work)).unflatten(0, place.shape)
        output = run(rows, x).flatten(0, 1)
        target = data.y.index_select(0, place.reshape(-1)).to(work.device)
        marks = (accuracy(output, target), each(loss, output, target), class_scores(output, target))
        parts.append([mark.unflatten(0, place.shape).cpu() for mark in marks])
    hits, losses, guesses = (torch.cat(list(part), dim=1) for part in zip(*parts, strict=True))
    for i, n in enumerate(count.tolist()):
        yield hits[i, :n].double(), losses[i, :n].double(), guesses[i, :n]


def class_scores(output: Tensor, y: Tensor) -> Tensor:
    """Probabilities `[n, C]` where the output is a choice between classes, else `[n, 0]`."""
    plain = output.ndim == 2 and y.ndim == 1 and not y.is_floating_point()
    return output.softmax(1) if plain else output.new_zeros(len(output), 0)


def scores(work: Working, loss: Loss, x: Tensor, y: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Accuracy and loss of each sample at these places, float64 `[n]`, and its class scores `[n, C]`, on the CPU.

    Batches are as equal as can be: with batch statistics, a last batch of one would say nothing.
    """
    hits, losses, guesses = [torch.zeros(0)], [torch.zeros(0)], []
    for place in places.to(x.device).tensor_split(-(-len(places) // BATCH) or 1):
        if len(place):
            output = work.module(prepared(gathered(x, place, work)))
            target = y.index_select(0, place).to(work.device)
            hits.append(accuracy(output, target).cpu())
            losses.append(each(loss, output, target).cpu())
            guesses.append(class_scores(output, target).cpu())
    whole = torch.cat(guesses) if guesses else torch.zeros(0, 0)
    return torch.cat(hits).double(), torch.cat([x.double() for x in losses]), whole
