"""Dropout and BatchNorm that know whose step it is, as classes that take the place of torch's in a working copy.

What `train.keyed_layers` does by hooks, for paths that recast layers anyway: here calls take less time, and clients may
be stacked (vmap), with padding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.train.keyed_layers import (
    BATCH_NORMS,
    CHANNEL_DROPOUTS,
    KeyedStep,
    batch_statistics,
    masked_by_key,
    normalised,
)
from sparing.train.working_copy import WorkingCopy, copied_module, described_copy


class KeyedDropout(nn.Dropout):
    """Dropout drawn from the step's key, the same for one client as for many under vmap."""

    step: KeyedStep
    flat = False  # whether what comes out will be flattened

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        return masked_by_key(input.contiguous() if self.flat else input, self.p, False, self.step)


class KeyedChannelDropout(nn.Dropout):
    """The same for whole channels: `[B, C, ...]`."""

    step: KeyedStep

    def forward(self, input: Tensor) -> Tensor:
        return masked_by_key(input, self.p, True, self.step) if self.training and self.p else input


class LoopNorm(_BatchNorm):
    """BatchNorm as torch has it, except that a single value per channel is normalised with the running statistics.

    torch refuses that case; here the statistics stay as they are.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or input.numel() > input.shape[1]:
            return super().forward(input)
        if self.running_mean is None:
            return _normalised_by_batch(input, self)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class StaticNorm(LoopNorm):
    """Batch statistics always, in evaluation too; running statistics are neither used nor changed.

    A single value per channel is its own mean with variance 0, so it comes out as the bias.
    """

    def forward(self, input: Tensor) -> Tensor:
        return _normalised_by_batch(input, self)


def _normalised_by_batch(x: Tensor, layer: _BatchNorm) -> Tensor:
    if x.numel() > x.shape[1]:
        return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    mean, var, _ = batch_statistics(x, None)  # torch would give a rounding error instead of zero, and ReLU its sign
    return normalised(x, mean, var, layer)


class StackedNorm(LoopNorm):
    """LoopNorm for use under vmap: padding enters no statistic, and buffers are replaced, not written to."""

    step: KeyedStep

    def forward(self, input: Tensor) -> Tensor:
        mean, var, n = batch_statistics(input, self.step.real)
        if self.running_mean is not None and self.running_var is not None:
            many = n > 1
            fresh = mean.detach(), var.detach() * (n / (n - 1).clamp(min=1))
            mean = torch.where(many, mean, self.running_mean)
            var = torch.where(many, var, self.running_var)
            self.track(*fresh, many)
        return normalised(input, mean, var, self)

    def track(self, mean: Tensor, var: Tensor, many: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked = self.num_batches_tracked + many.to(torch.int64)
        share = 1 / self.num_batches_tracked.clamp(min=1) if self.momentum is None else self.momentum
        self.running_mean = torch.where(many, (1 - share) * self.running_mean + share * mean, self.running_mean)
        self.running_var = torch.where(many, (1 - share) * self.running_var + share * var, self.running_var)


class StackedStaticNorm(LoopNorm):
    """StaticNorm for use under vmap."""

    step: KeyedStep

    def forward(self, input: Tensor) -> Tensor:
        mean, var, _ = batch_statistics(input, self.step.real)
        return normalised(input, mean, var, self)


def recast_keyed_layers(model: nn.Module, stacked: bool, static: bool) -> KeyedStep:
    """Turn the layers of this working copy into the ones above and hand back the step they look at."""
    step = KeyedStep()
    norm = (StackedStaticNorm if static else StackedNorm) if stacked else (StaticNorm if static else LoopNorm)
    swap: dict[type, Any] = {
        nn.Dropout: KeyedDropout,
        **dict.fromkeys(CHANNEL_DROPOUTS, KeyedChannelDropout),
        **dict.fromkeys(BATCH_NORMS, norm),
    }
    for layer in model.modules():
        if type(layer) in swap:
            layer.__class__ = swap[type(layer)]
            object.__setattr__(layer, "step", step)
    return step


def stacked_copy(model: nn.Module, device: torch.device, static: bool) -> WorkingCopy:
    """A working copy for use under vmap."""
    module = copied_module(model, device)
    return described_copy(module, recast_keyed_layers(module, stacked=True, static=static), device)
