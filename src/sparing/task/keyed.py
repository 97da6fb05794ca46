"""Dropout and BatchNorm that know whose step it is.

A working copy of a model has its dropout and BatchNorm layers recast to the classes below; weights, buffers, names
and everything else about them stay. All of them look at one `Step`, which the training loop sets before each forward.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.core.keys import GOLDEN, MUL1_U, MUL2_U, WORD, Ctx, few_keys, hashes, mix, mix_few, signed, uniforms

APART = np.uint64(5 * GOLDEN & WORD)


def drop_keys(ctx: Ctx, phase: int) -> Tensor:
    """`[K]`, each row apart."""
    keys = told_apart(few_keys(ctx, f"dropout/{phase}")[0], ctx.here[0].numpy())
    return torch.from_numpy(keys.view(np.int64)).to(ctx.ids.device)


def told_apart(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Rows of one client, which follow each other (bases of a `Mix`), get keys of their own; the first keeps its."""
    again = ids[1:] == ids[:-1]
    if not again.any():
        return keys
    first = np.flatnonzero(np.append(True, ~again))
    turn = np.arange(len(ids)) - np.repeat(first, np.diff(np.append(first, len(ids))))
    return np.where(turn > 0, mix_few(keys + turn.astype(np.uint64) * APART), keys)


class Step:
    """What the layers of one working copy need to know of the step being taken."""

    def __init__(self) -> None:
        self.key: Tensor | int | None = None  # int64, one per client and step: [], or [K]: K batches stand end to end
        self.real: Tensor | None = None  # [B] bool: false for padding; None: no padding anywhere
        self.draws = 0
        self.places = np.empty(0, np.uint64)  # what `hashes` adds to a key at each place

    def begin(self, key: Tensor | int | None, real: Tensor | None = None) -> None:
        """A key that is a plain int is one client's on a CPU."""
        self.key, self.real, self.draws = key, real, 0

    def uniform(self, n: int) -> Tensor:
        """`[n]` in [0, 1), new at every call; depends on key, call and place only: padding at the end is harmless."""
        assert isinstance(self.key, Tensor)
        self.draws += 1
        keys = mix(self.key + signed(self.draws * 3 * GOLDEN)).reshape(-1)
        return uniforms(hashes(keys, n // len(keys)).flatten())

    def scale(self, n: int, p: float, dtype: torch.dtype) -> Tensor:
        """`[n]`: 0 where the draw is below p, else 1 / (1 - p)."""
        rest = 1 / (1 - p) if p < 1 else 0.0
        if not isinstance(self.key, int):
            return (self.uniform(n) >= p).to(dtype).mul_(rest)
        self.draws += 1
        if len(self.places) < n:
            self.places = np.arange(1, n + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        key = mix_few(np.array([(self.key + self.draws * 3 * GOLDEN) & WORD], np.uint64))
        keep = drawn(self.places[:n] + key, p)
        return torch.from_numpy(keep * (np.float64 if dtype == torch.float64 else np.float32)(rest)).to(dtype)


def drawn(word: np.ndarray, p: float) -> np.ndarray:
    """`uniforms(mix(word)) >= p`: only the top 24 bits count, which the last line of `mix` leaves as they are.

    Overwrites `word`: new memory for every line would take as long as the hashing.

    >>> word = torch.arange(1000) * signed(GOLDEN)
    >>> bool((torch.from_numpy(drawn(word.numpy().view(np.uint64).copy(), 0.3)) == (uniforms(mix(word)) >= 0.3)).all())
    True
    """
    high = word >> np.uint64(30)
    word ^= high
    word *= MUL1_U
    word ^= np.right_shift(word, np.uint64(27), out=high)
    word *= MUL2_U
    word >>= np.uint64(40)
    return word >= np.uint64(math.ceil(float(np.float32(p)) * 2**24))


class KeyedDropout(nn.Dropout):
    """Dropout drawn from the step's key, the same for one client as for many under vmap."""

    step: Step
    flat = False  # whether what comes out will be flattened

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        return dropped(input.contiguous() if self.flat else input, tuple(input.shape), self)


class KeyedChannelDropout(nn.Dropout):
    """The same for whole channels: `[B, C, ...]`."""

    step: Step

    def forward(self, input: Tensor) -> Tensor:
        shape = (*input.shape[:2], *[1] * (input.ndim - 2))
        return dropped(input, shape, self) if self.training and self.p else input


def dropped(x: Tensor, shape: tuple[int, ...], layer: KeyedDropout | KeyedChannelDropout) -> Tensor:
    return x * layer.step.scale(torch.Size(shape).numel(), layer.p, x.dtype).reshape(shape)


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
            return by_batch(input, self)
        return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class StaticNorm(LoopNorm):
    """Batch statistics always, in evaluation too; running statistics are neither used nor changed.

    A single value per channel is its own mean with variance 0, so it comes out as the bias.
    """

    def forward(self, input: Tensor) -> Tensor:
        return by_batch(input, self)


def by_batch(x: Tensor, layer: _BatchNorm) -> Tensor:
    if x.numel() > x.shape[1]:
        return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=layer.eps)
    mean, var, _ = statistics(x, None)  # torch would give a rounding error instead of zero, and ReLU its sign
    return normed(x, mean, var, layer)


class StackedNorm(LoopNorm):
    """LoopNorm for use under vmap: padding enters no statistic, and buffers are replaced, not written to."""

    step: Step

    def forward(self, input: Tensor) -> Tensor:
        mean, var, n = statistics(input, self.step.real)
        if self.running_mean is not None and self.running_var is not None:
            many = n > 1
            fresh = mean.detach(), var.detach() * (n / (n - 1).clamp(min=1))
            mean = torch.where(many, mean, self.running_mean)
            var = torch.where(many, var, self.running_var)
            self.track(*fresh, many)
        return normed(input, mean, var, self)

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

    step: Step

    def forward(self, input: Tensor) -> Tensor:
        mean, var, _ = statistics(input, self.step.real)
        return normed(input, mean, var, self)


def statistics(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean `[C]`, biased variance `[C]` and values per channel `[]`, over the real samples of `x [B, C, ...]`."""
    axes = [i for i in range(x.ndim) if i != 1]
    each = x.shape[2:].numel()
    if real is None:
        var, mean = torch.var_mean(x, dim=axes, correction=0)
        return mean, var, torch.full((), x.shape[0] * each, dtype=x.dtype, device=x.device)
    weight = real.to(x.dtype)
    n = weight.sum() * each
    weight = weight.view(-1, *[1] * (x.ndim - 1))
    mean = (x * weight).sum(axes) / n
    far = (x - mean.view(1, -1, *[1] * (x.ndim - 2))) * weight
    return mean, far.square().sum(axes) / n, n


def normed(x: Tensor, mean: Tensor, var: Tensor, layer: _BatchNorm) -> Tensor:
    """Centred first: folding the mean into the bias would cancel digits where the variance is small."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    scale = (var + layer.eps).rsqrt()
    x = (x - mean.view(shape)) * (scale * layer.weight if layer.affine else scale).view(shape)
    return x + layer.bias.view(shape) if layer.affine else x


NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
CHANNELS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def recast(model: nn.Module, stacked: bool, static: bool) -> Step:
    """Turn the layers of this working copy into the ones above and hand back the step they look at."""
    step = Step()
    norm = (StackedStaticNorm if static else StackedNorm) if stacked else (StaticNorm if static else LoopNorm)
    swap: dict[type, Any] = {
        nn.Dropout: KeyedDropout,
        **dict.fromkeys(CHANNELS, KeyedChannelDropout),
        **dict.fromkeys(NORMS, norm),
    }
    for layer in model.modules():
        if type(layer) in swap:
            layer.__class__ = swap[type(layer)]
            object.__setattr__(layer, "step", step)
    return step
