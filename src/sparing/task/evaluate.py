"""Accuracy and loss of models on samples. Evaluating changes nothing: no model, no random state, no mode."""

import torch
from torch import Tensor, nn

from sparing.core.tree import Tree, rows
from sparing.task.clients import Clients
from sparing.task.losses import Loss, accuracy, each
from sparing.task.still import intra_op, own_rng
from sparing.task.working import Working, check_names, gathered, load, working_copy

BATCH = 512


def evaluate(
    model: nn.Module, loss: Loss, models: Tree, data: Clients, ids: Tensor, static: bool = False
) -> dict[str, Tensor]:
    """Client k's model (leaves `[K, *shape]`, or `[1, *shape]` for all) on the samples of client ids[k].

    Gives accuracy and loss, float64 `[K]`, and count, int64 `[K]`, on the CPU. A client without samples has NaN;
    so has accuracy where targets are floats. `static`: BatchNorm uses batch statistics, as in training.

    Models of their own are run one by one, so that a row does not depend on the chunk. One model for everybody runs
    over all samples together, where it may in the last bits.

    >>> data = Clients.of([([[1.0, 0.0]], [0]), ([[0.0, 1.0], [3.0, 0.0]], [1, 1])])
    >>> model, loss = nn.Linear(2, 2, bias=False), nn.CrossEntropyLoss(reduction="none")
    >>> evaluate(model, loss, {"weight": torch.eye(2)[None]}, data, torch.arange(2))["accuracy"]
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    check_names(model, models)
    ids, k = ids.cpu(), len(ids)
    count = data.count[ids]
    right, lost = torch.zeros(k, dtype=torch.float64), torch.zeros(k, dtype=torch.float64)
    work = frozen_copy(model, models, static)
    with torch.no_grad(), own_rng(work.device), intra_op(1):
        if rows(models) == 1 and not static:
            load(work, models, 0)
            owner = torch.arange(k).repeat_interleave(count)
            place = (data.start[ids] - (count.cumsum(0) - count))[owner] + torch.arange(len(owner))
            hits, losses = scores(work, loss, data.x, data.y, place)
            right.index_add_(0, owner, hits)
            lost.index_add_(0, owner, losses)
        else:
            for i, n in enumerate(count.tolist()):
                load(work, models, i)
                x, y = data.client(int(ids[i]))
                hits, losses = scores(work, loss, x, y, torch.arange(n))
                right[i], lost[i] = hits.sum(), losses.sum()
    return {"accuracy": right / count, "loss": lost / count, "count": count}


def evaluate_all(
    model: nn.Module, loss: Loss, tree: Tree, x: Tensor, y: Tensor, static: bool = False
) -> dict[str, float]:
    """One model (leaves `[1, *shape]`) on one set of samples: accuracy, loss and count.

    >>> out = evaluate_all(nn.Flatten(), nn.CrossEntropyLoss(reduction="none"), {}, torch.eye(2), torch.tensor([0, 0]))
    >>> out["accuracy"], out["count"]
    (0.5, 2)
    """
    check_names(model, tree)
    work = frozen_copy(model, tree, static)
    with torch.no_grad(), own_rng(work.device):
        load(work, tree, 0)
        hits, losses = scores(work, loss, x, y, torch.arange(len(x)))
    return {"accuracy": float(hits.mean()), "loss": float(losses.mean()), "count": len(x)}


def frozen_copy(model: nn.Module, tree: Tree, static: bool) -> Working:
    device = next(iter(tree.values())).device if tree else torch.device("cpu")
    work = working_copy(model, device, stacked=False, static=static)
    work.module.eval()
    return work


def scores(work: Working, loss: Loss, x: Tensor, y: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Accuracy and loss of each sample at these places, float64 `[n]` on the CPU.

    Batches are as equal as can be: with batch statistics, a last batch of one would say nothing.
    """
    hits, losses = [torch.zeros(0)], [torch.zeros(0)]
    for place in places.to(x.device).tensor_split(-(-len(places) // BATCH) or 1):
        if len(place):
            output = work.module(gathered(x, place, work))
            target = y.index_select(0, place).to(work.device)
            hits.append(accuracy(output, target).cpu())
            losses.append(each(loss, output, target).cpu())
    return torch.cat(hits).double(), torch.cat([x.double() for x in losses])
