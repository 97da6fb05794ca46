"""Losses and accuracy per sample: `(output, y) -> [B]`, and what a batch of them comes to.

Targets of sequences `[B, T]` may hold -100 where there is nothing to guess, as after the end of a shorter one: such a
place counts in no loss and no accuracy. Under cross entropy a batch then comes to the mean over its tokens, so a
sequence weighs as many as it has.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from sparing.core.errors import ConfigError, DataError
from sparing.data.dataset import IGNORED
from sparing.train.model_call import main_tensor

Loss = Callable[[Any, Tensor], Tensor]
"""What the model gives, mostly a tensor, and the targets, to one number per sample."""


_HALVES = (torch.bfloat16, torch.float16)  # too coarse for a loss


def default_loss(y: Tensor) -> Loss:
    """Cross entropy for integer targets, mean squared error for float ones."""
    return squared_error if y.is_floating_point() else cross_entropy


def sample_losses(loss: Loss, output: Any, y: Tensor) -> Tensor:
    """The loss of each sample, refused where it is not `[B]`: a mean would hide padding and weigh batches wrongly."""
    if not isinstance(output, Tensor) and loss in (cross_entropy, squared_error):
        first = main_tensor(output)
        if first is None:
            raise ConfigError(
                f"what the model gives is of type {type(output).__name__}, and the usual losses take one tensor: give "
                "Task a loss of (output, y) that takes it apart, or a model that gives one tensor"
            )
        output = first
    value = loss(output, y)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        seen = f"{value.dtype} numbers" if isinstance(value, Tensor) else f"something of type {type(value).__name__}"
        raise ConfigError(f"the loss gives {seen}: let it give a tensor of floats, one per sample")
    if value.shape != y.shape[:1]:
        raise ConfigError(
            f"the loss gives shape {tuple(value.shape)} for {y.shape[0]} samples: let it give one number per sample, "
            "as torch's losses do with reduction='none'"
        )
    return value


def in_float32(output: Any) -> Any:
    """What a model gives in half precision, as losses take it; a tuple or dict of tensors stays one."""
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.is_floating_point() else x, output)


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """Classes `y [B]`, or sequences `[B, T]` with the mean over the places that count; zero where none does.

    The class axis of `output` is the last one, or axis 1 where only that fits y.

    >>> cross_entropy(torch.zeros(1, 3, 2), torch.tensor([[0, 1, 1]]))
    tensor([0.6931])
    """
    output = output.float() if output.dtype in _HALVES else output
    if y.ndim == 1:
        return F.cross_entropy(output, y, reduction="none")
    logits = classes_last(output, y)
    if logits is None:
        raise DataError(
            f"the model gives {tuple(output.shape)} for targets {tuple(y.shape)}: give it {(*y.shape, 'classes')}"
        )
    flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), y.reshape(-1), reduction="none", ignore_index=IGNORED)
    return flat.reshape(y.shape[0], -1).sum(1) / _tokens(y).clamp(min=1)


def _tokens(y: Tensor) -> Tensor:
    """How many places of each sample count: [B]."""
    return (y != IGNORED).flatten(1).sum(1)


def sample_weights(loss: Loss, y: Tensor) -> Tensor | None:
    """What each sample counts in a mean, float32 `[B]`: its tokens, under our cross entropy; None: all the same.

    >>> sample_weights(cross_entropy, torch.tensor([[3, 1, -100], [2, -100, -100]]))
    tensor([2., 1.])
    """
    return _tokens(y).float() if loss is cross_entropy and y.ndim > 1 else None


def batch_mean(losses: Tensor, weights: Tensor | None = None, real: Tensor | None = None) -> Tensor:
    """The mean over the last axis, which is a batch's samples; `real`: false for those that only fill it up.

    >>> float(batch_mean(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0])))
    2.0
    """
    if weights is None:
        return losses.mean(-1) if real is None else torch.where(real, losses, 0.0).sum(-1) / real.sum(-1).clamp(min=1)
    weights = weights if real is None else torch.where(real, weights, 0.0)
    return (losses * weights).sum(-1) / weights.sum(-1).clamp(min=1)


def squared_error(output: Tensor, y: Tensor) -> Tensor:
    """Mean over each sample's values; an output `[B, 1]` fits targets `[B]`."""
    if output.numel() != y.numel():
        raise DataError(
            f"the model gives {tuple(output.shape)} for float targets {tuple(y.shape)}: give it the targets' shape, or "
            "give classes as whole numbers"
        )
    return (output.reshape(y.shape) - y).square().reshape(y.shape[0], -1).mean(1)


def accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Share of each sample's labels guessed right, `[B]`, of sequences among the places that count; NaN where the
    output is no choice between classes.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    tensor([1., 0.])
    """
    logits = None if y.is_floating_point() else classes_last(output, y)
    if logits is None or logits.shape[-1] < 2:
        return torch.full((len(y),), torch.nan, device=y.device)
    right = (logits.argmax(-1) == y).float()
    return right if y.ndim == 1 else right.flatten(1).sum(1) / _tokens(y).clamp(min=1)


def yes_or_no(output: Tensor, y: Tensor, loss: Loss) -> bool:
    """Whether each target may be a yes or no of its own: one logit for each, and a loss that is not of values."""
    return output.numel() == y.numel() and (not y.is_floating_point() or loss is not squared_error)


def yes_or_no_accuracy(output: Tensor, y: Tensor) -> Tensor:
    """Share of each sample's targets guessed right, `[B]`, where a logit above zero is a yes; NaN where a target is
    neither 0 nor 1.

    >>> yes_or_no_accuracy(torch.tensor([[2.0, -1.0], [-3.0, 1.0]]), torch.tensor([[1, 1], [0, 7]]))
    tensor([0.5000,    nan])
    """
    logits, targets = output.reshape(len(y), -1), y.reshape(len(y), -1)
    right = ((logits > 0) == (targets == 1)).float()
    return torch.where((targets == 0) | (targets == 1), right, torch.nan).mean(1)


def classes_last(output: Tensor, y: Tensor) -> Tensor | None:
    if output.shape[:-1] == y.shape:
        return output
    if output.ndim == y.ndim + 1 and output.shape[:1] + output.shape[2:] == y.shape:
        return output.movedim(1, -1)
    return None
