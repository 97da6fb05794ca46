"""Accuracy and loss of models on samples. Evaluating changes nothing: no model, no random state, no mode."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.core.errors import ConfigError
from sparing.core.threads import intra_op
from sparing.core.tree import Tree, row_count
from sparing.data.clients import Clients
from sparing.data.dataset import to_network_input
from sparing.data.inputs import Samples
from sparing.train.keyed_layers import looks_at_batches
from sparing.train.losses import Loss, accuracy, sample_losses, sample_weights, yes_or_no, yes_or_no_accuracy
from sparing.train.metrics import micro_aucs
from sparing.train.model_call import call_model, main_tensor
from sparing.train.named_metrics import Metric, metric_values, metrics_by_client, metrics_of_loss
from sparing.train.torch_rng import GATE, own_rng
from sparing.train.working_copy import (
    WorkingCopy,
    check_names,
    device_of_tree,
    gathered_samples,
    load_row,
    samples_at_once,
    working_copy,
)


class Scores(NamedTuple):
    """What a model makes of n samples, on its device."""

    hits: Tensor  # [n] accuracy of each
    losses: Tensor  # [n]
    guesses: Tensor  # [n, C] probabilities where the output is a choice between classes or yes or no, else [n, 0]
    y: Tensor  # [n, ...] their targets
    outputs: Tensor  # [n, ...] where metrics ask for them, else [n, 0]
    weights: Tensor  # [n] what each counts in a mean: of sequences, their tokens


Score = Callable[[Tensor], Scores]
"""Of the samples at these places."""
Spread = Callable[[list[Tensor], Score], list[Scores]]
"""Scores batches of places, wherever that is done."""


def score_here(batches: list[Tensor], score: Score) -> list[Scores]:
    return [score(batch) for batch in batches]


CopyMaker = Callable[[nn.Module, torch.device, bool], WorkingCopy]
"""Makes a working copy of a model on a device; the bool: `static`."""


class Runner(NamedTuple):
    """How models are run outside training."""

    copy: CopyMaker  # in evaluation mode, new
    lend: Callable[[nn.Module, torch.device, bool], AbstractContextManager[WorkingCopy]]  # the same, for the time being
    score_rows: Callable[[WorkingCopy, Loss, Tree, Clients, Tensor, bool], Scores] | None = None  # K models at once


def frozen_copy(model: nn.Module, device: torch.device, static: bool) -> WorkingCopy:
    """A working copy in evaluation mode."""
    work = working_copy(model, device, static)
    work.module.eval()
    return work


@contextmanager
def _lent(model: nn.Module, device: torch.device, static: bool) -> Iterator[WorkingCopy]:
    yield frozen_copy(model, device, static)


PLAIN_RUNNER = Runner(frozen_copy, _lent)


def evaluate_rows(
    model: nn.Module,
    loss: Loss,
    models: Tree,
    data: Clients,
    ids: Tensor,
    static: bool = False,
    runner: Runner = PLAIN_RUNNER,
    metrics: Sequence[Metric] = (),
) -> dict[str, Tensor]:
    """Client k's model (leaves `[K, *shape]`, or `[1, *shape]` for all) on the samples of client ids[k].

    Gives accuracy, loss, auc and the `metrics`, float64 `[K]`, and count, int64 `[K]`, on the CPU. A client without
    samples has NaN; so have accuracy and auc where targets are neither classes nor 0 and 1. Of sequences, accuracy and
    loss are means over tokens. `static`: BatchNorm uses batch statistics, as in training.

    Models of their own are run one by one, so that a row does not depend on the chunk, or all at once where the
    `runner` does so and the last bits may; a model that looks at batch statistics always runs by itself. One model for
    everybody runs over all samples together, where they may as well.

    >>> data = Clients.of([([[1.0, 0.0]], [0]), ([[0.0, 1.0], [3.0, 0.0]], [1, 1])])
    >>> model, loss = nn.Linear(2, 2, bias=False), nn.CrossEntropyLoss(reduction="none")
    >>> evaluate_rows(model, loss, {"weight": torch.eye(2)[None]}, data, torch.arange(2))["accuracy"]
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    check_names(model, models)
    ids, k = ids.cpu(), len(ids)
    count = data.count[ids]
    owner = torch.arange(k).repeat_interleave(count)
    alone, keep = static or looks_at_batches(model, static), any(one.of is not None for one in metrics)
    lent = runner.lend(model, device_of_tree(models), static)
    with torch.no_grad(), GATE.side_by_side(), lent as work, own_rng(work.device), intra_op(1):
        if row_count(models) == 1 and not alone:
            load_row(work, models, 0)
            place = (data.start[ids] - (count.cumsum(0) - count))[owner] + torch.arange(len(owner))
            found = _scores(work, loss, data.x, data.y, place, keep)
        elif runner.score_rows is not None and not alone:
            found = runner.score_rows(work, loss, models, data, ids, keep)
        else:
            parts = []
            for i in count.nonzero()[:, 0].tolist():
                load_row(work, models, i)
                x, y = data.client(int(ids[i]))
                parts.append(_scores(work, loss, x, y, torch.arange(len(x)), keep))
            found = _joined_scores(parts)
        area = _areas(found, owner.to(work.device, non_blocking=True), k)
        weight = found.weights.double()
        figures = torch.cat([found.hits.double() * weight, found.losses.double() * weight, weight, area]).cpu()
    n = len(owner)
    sums = (torch.zeros(k, dtype=torch.float64).index_add_(0, owner, x) for x in figures.split([n, n, n, k])[:3])
    right, lost, weighed = sums
    loss_K = lost / weighed
    asked = metrics_by_client(metrics, found.outputs.cpu(), found.y.cpu(), count.tolist()) if keep else {}
    asked = {**asked, **metrics_of_loss(metrics, loss_K)}
    return {"accuracy": right / weighed, "loss": loss_K, "auc": figures[3 * n :], "count": count, **asked}


def evaluate_all(
    model: nn.Module,
    loss: Loss,
    tree: Tree,
    x: Samples,
    y: Tensor,
    static: bool = False,
    runner: Runner = PLAIN_RUNNER,
    metrics: Sequence[Metric] = (),
    spread: Spread = score_here,
) -> dict[str, float]:
    """One model (leaves `[1, *shape]`) on one set of samples: accuracy, loss, auc, the `metrics` and count.

    >>> out = evaluate_all(nn.Flatten(), nn.CrossEntropyLoss(reduction="none"), {}, torch.eye(2), torch.tensor([0, 0]))
    >>> out["accuracy"], out["count"]
    (0.5, 2)
    """
    check_names(model, tree)
    keep = any(one.of is not None for one in metrics)
    with torch.no_grad(), runner.lend(model, device_of_tree(tree), static) as work, own_rng(work.device):
        load_row(work, tree, 0)
        found = _scores(work, loss, x, y, torch.arange(len(x), device=x.device), keep, spread)
        area = _areas(found, torch.zeros(len(x), dtype=torch.int64, device=work.device), 1)
        weight = found.weights.double()
        right, lost = ((x.double() * weight).sum() / weight.sum() for x in (found.hits, found.losses))
        figures = torch.stack([right, lost, area[0]])
    hit, lost, under = figures.tolist()
    asked = metric_values(metrics, found.outputs.cpu(), found.y.cpu()) if keep else {}
    asked |= {name: float(x) for name, x in metrics_of_loss(metrics, figures[1]).items()}
    return {"accuracy": hit, "loss": lost, "auc": under, "count": len(x), **asked}


def _areas(found: Scores, owner: Tensor, k: int) -> Tensor:
    """The area under the ROC curve of each of k clients, float64 `[k]`."""
    guesses, y = found.guesses, found.y
    if not guesses.numel() or guesses.numel() != y.numel():
        return micro_aucs(guesses, y, owner, k)
    if not bool(((y == 0) | (y == 1)).all()):
        return micro_aucs(guesses[:, :0], y, owner, k)
    both = torch.stack([1 - guesses, guesses], -1).flatten(0, 1)  # every yes or no is a choice between two classes
    return micro_aucs(both, y.flatten().long(), owner.repeat_interleave(guesses.shape[1]), k)


def _scores(
    work: WorkingCopy, loss: Loss, x: Samples, y: Tensor, places: Tensor, keep: bool, spread: Spread = score_here
) -> Scores:
    """Of the samples at these places; `keep` their outputs.

    Batches are as equal as can be: with batch statistics, a last batch of one would say nothing.
    """

    def score(place: Tensor) -> Scores:
        output = call_model(work.module, to_network_input(gathered_samples(x, place, work)))
        return scored_batch(loss, output, y.index_select(0, place).to(work.device), keep)

    batches = places.to(x.device).tensor_split(-(-len(places) // samples_at_once(work, x)) or 1)
    return _joined_scores(spread([place for place in batches if len(place)], score))


def scored_batch(loss: Loss, output: Any, y: Tensor, keep: bool = False) -> Scores:
    first = main_tensor(output)
    if first is None:
        raise ConfigError(
            f"in evaluation, what the model gives is of type {type(output).__name__}, and accuracy is taken of one "
            "tensor: let its forward give the tensor alone unless self.training"
        )
    outputs = first if keep else first.new_zeros(len(first), 0)
    weights = sample_weights(loss, y)
    weights = first.new_ones(len(first), dtype=torch.float32) if weights is None else weights
    if yes_or_no(first, y, loss):
        guesses = first.reshape(len(first), -1).sigmoid()
        return Scores(yes_or_no_accuracy(first, y), sample_losses(loss, output, y), guesses, y, outputs, weights)
    plain = first.ndim == 2 and y.ndim == 1 and not y.is_floating_point()
    guesses = first.softmax(1) if plain else first.new_zeros(len(first), 0)
    return Scores(accuracy(first, y), sample_losses(loss, output, y), guesses, y, outputs, weights)


def _joined_scores(parts: list[Scores]) -> Scores:
    if not parts:
        none = torch.zeros(0)
        return Scores(none, none, none, none, none, none)
    return Scores(*(torch.cat(part) for part in zip(*parts, strict=True)))
