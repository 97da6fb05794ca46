"""Dropout and BatchNorm that know whose step it is: the two kinds of layers that local training touches, by hooks.

Dropout is drawn from a key of the client and the step, so a client's masks are the same whoever else is trained with
it. BatchNorm takes a single value per channel, which torch refuses in training, with the running statistics; `static`
BatchNorm uses the batch's statistics always. All layers of a working copy look at one `KeyedStep`, which the training
loop sets before each forward. Subclasses of torch's layers are left alone.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.core.context import Ctx, few_keys
from sparing.core.keys import GOLDEN, MUL1_U, MUL2_U, WORD, hashes, mix, mix_few, signed, uniforms

CHANNEL_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_APART = np.uint64(5 * GOLDEN & WORD)


def dropout_keys(ctx: Ctx, phase: int) -> Tensor:
    """`[K]`, each row apart."""
    keys = keys_told_apart(few_keys(ctx, f"dropout/{phase}")[0], ctx.ids.numpy())
    return torch.from_numpy(keys.view(np.int64)).to(ctx.device)


def keys_told_apart(keys: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Rows of one client, which follow each other (bases of a `Mix`), get keys of their own; the first keeps its."""
    again = ids[1:] == ids[:-1]
    if not again.any():
        return keys
    first = np.flatnonzero(np.append(True, ~again))
    turn = np.arange(len(ids)) - np.repeat(first, np.diff(np.append(first, len(ids))))
    return np.where(turn > 0, mix_few(keys + turn.astype(np.uint64) * _APART), keys)


class KeyedStep:
    """What the layers of one working copy need to know of the step being taken."""

    def __init__(self) -> None:
        self.key: Tensor | int | None = None  # int64, one per client and step: [], or [K]: K batches stand end to end
        self.real: Tensor | None = None  # [B] bool: false for padding; None: no padding anywhere
        self.draws = 0
        self.rows: slice | None = None  # of a batch that is computed in parts: those of this one
        self.seeded = False  # whether torch's generator is this client's alone
        self.places = np.empty(0, np.uint64)  # what `hashes` adds to a key at each place

    def begin(self, key: Tensor | int | None, real: Tensor | None = None, rows: slice | None = None) -> None:
        """A key that is a plain int is one client's on a CPU."""
        self.key, self.real, self.draws, self.rows = key, real, 0, rows

    def first_place(self, n: int) -> int:
        """Where in the whole batch's draw `[n]` of these rows begin, samples standing along the first axis."""
        return 0 if self.rows is None else self.rows.start * (n // max(1, self.rows.stop - self.rows.start))

    def uniform(self, n: int) -> Tensor:
        """`[n]` in [0, 1), new at every call; depends on key, call and place only: padding at the end is harmless."""
        assert isinstance(self.key, Tensor)
        self.draws += 1
        keys = mix(self.key + signed(self.draws * 3 * GOLDEN)).reshape(-1)
        return uniforms(hashes(keys, n // len(keys), self.first_place(n)).flatten())

    def scale(self, n: int, p: float, dtype: torch.dtype) -> Tensor:
        """`[n]`: 0 where the draw is below p, else 1 / (1 - p)."""
        rest = 1 / (1 - p) if p < 1 else 0.0
        if not isinstance(self.key, int):
            return (self.uniform(n) >= p).to(dtype).mul_(rest)
        self.draws += 1
        first = self.first_place(n)
        if len(self.places) < first + n:
            self.places = np.arange(1, first + n + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        key = mix_few(np.array([(self.key + self.draws * 3 * GOLDEN) & WORD], np.uint64))
        keep = _at_least(self.places[first : first + n] + key, p)
        return torch.from_numpy(keep * (np.float64 if dtype == torch.float64 else np.float32)(rest)).to(dtype)


def _at_least(word: np.ndarray, p: float) -> np.ndarray:
    """`uniforms(mix(word)) >= p`: only the top 24 bits count, which the last line of `mix` leaves as they are.

    Overwrites `word`: new memory for every line would take as long as the hashing.

    >>> word = torch.arange(1000) * signed(GOLDEN)
    >>> got = _at_least(word.numpy().view(np.uint64).copy(), 0.3)
    >>> bool((torch.from_numpy(got) == (uniforms(mix(word)) >= 0.3)).all())
    True
    """
    high = word >> np.uint64(30)
    word ^= high
    word *= MUL1_U
    word ^= np.right_shift(word, np.uint64(27), out=high)
    word *= MUL2_U
    word >>= np.uint64(40)
    return word >= np.uint64(math.ceil(float(np.float32(p)) * 2**24))


def masked_by_key(x: Tensor, p: float, channels: bool, step: KeyedStep) -> Tensor:
    """Dropout of single values, or of whole channels of `x [B, C, ...]`."""
    shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if channels else tuple(x.shape)
    return x * step.scale(torch.Size(shape).numel(), p, x.dtype).reshape(shape)


def hook_keyed_layers(model: nn.Module, static: bool) -> KeyedStep:
    """Hook the dropout and BatchNorm layers of this working copy, and hand back the step that they look at."""
    step = KeyedStep()
    for layer in model.modules():
        kind, hooks = type(layer), None
        if kind is nn.Dropout or kind in CHANNEL_DROPOUTS:
            hooks = _DropoutHooks(step, kind in CHANNEL_DROPOUTS)
        elif kind in BATCH_NORMS:
            hooks = _BatchNormHooks(static)
        if hooks is not None:
            layer.register_forward_pre_hook(hooks.before, with_kwargs=True)
            layer.register_forward_hook(hooks.after, prepend=True)
    return step


class _DropoutHooks:
    """Before a call, the layer is put in evaluation mode; after it, what came out is multiplied by the keyed mask."""

    def __init__(self, step: KeyedStep, channels: bool) -> None:
        self.step, self.channels, self.drops = step, channels, False

    def before(self, layer: Any, args: tuple, kwargs: dict) -> None:
        self.drops = layer.training and layer.p > 0
        if self.drops:
            layer.training = False

    def after(self, layer: Any, args: tuple, output: Tensor) -> Tensor:
        if not self.drops:
            return output
        layer.training = True
        return masked_by_key(output, layer.p, self.channels, self.step)


class _BatchNormHooks:
    """Which statistics a call of the layer uses is set before it, and set back after it.

    A single value per channel without statistics to go by is its own mean with variance 0, so it comes out as the bias:
    torch refuses it, so the layer is given it twice, and what comes out is replaced.
    """

    def __init__(self, static: bool) -> None:
        self.static, self.modes, self.alone = static, (False, False), None

    def before(self, layer: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        x = args[0] if args else kwargs["input"]
        self.modes, self.alone = (layer.training, layer.track_running_stats), None
        one = x.ndim > 1 and x.numel() <= x.shape[1]
        if self.static:
            layer.training, layer.track_running_stats = True, False
        elif one and layer.running_mean is not None:
            layer.training = False
        if one and (self.static or layer.running_mean is None):
            self.alone = x
            return (torch.cat([x, x]),), {}
        return None

    def after(self, layer: Any, args: tuple, output: Tensor) -> Tensor:
        layer.training, layer.track_running_stats = self.modes
        if self.alone is None:
            return output
        mean, var, _ = batch_statistics(self.alone, None)
        return normalised(self.alone, mean, var, layer)


def batch_statistics(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
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


def normalised(x: Tensor, mean: Tensor, var: Tensor, layer: _BatchNorm) -> Tensor:
    """Centred first: folding the mean into the bias would cancel digits where the variance is small."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    scale = (var + layer.eps).rsqrt()
    x = (x - mean.view(shape)) * (scale * layer.weight if layer.affine else scale).view(shape)
    return x + layer.bias.view(shape) if layer.affine else x


def looks_at_batches(model: nn.Module, static: bool) -> bool:
    """Whether what the model gives for a sample in evaluation depends on which others stand in its batch."""
    return any(
        isinstance(layer, _BatchNorm) and (layer.running_mean is None or (static and type(layer) in BATCH_NORMS))
        for layer in model.modules()
    )
