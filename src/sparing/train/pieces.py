"""A training step in pieces: the same gradient in less memory.

A batch's gradient is the sum of its micro-batches', each weighed by what it counts in the batch's mean: samples, or of
sequences tokens. Repeated blocks of a network may keep their inputs alone and compute the rest again for the gradient.
The logits of a language model, a number for every token and word, may be formed for a few tokens at a time.

All of it comes to the whole step within rounding; a micro-batch that holds the whole batch changes no bit.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparing.core.errors import ConfigError
from sparing.data.dataset import IGNORED
from sparing.data.inputs import Samples
from sparing.train.gradient import gradients
from sparing.train.keyed_layers import KeyedStep
from sparing.train.losses import Loss, batch_mean, sample_losses, sample_weights
from sparing.train.model_call import Unformed
from sparing.train.working_copy import WorkingCopy

LOGITS_AT_ONCE = 1 << 26
"""Bytes of logits in float32 that are formed at a time, where they are formed in parts."""


class StepPieces(NamedTuple):
    microbatch: int | None = None  # samples computed at once; None: the whole batch
    recompute: bool = False  # of repeated blocks, keep the inputs only
    head: str = ""  # the layer whose outputs, logits, are formed a few tokens at a time; empty: all at once


WHOLE = StepPieces()


def set_pieces(work: WorkingCopy, pieces: StepPieces) -> None:
    """Let the blocks and the head of this working copy do so."""
    if pieces.recompute:
        blocks = repeated_blocks(work.module)
        if not blocks:
            raise ConfigError("plan.recompute is true, but the model has no repeated blocks to compute again; drop it")
        for block in blocks.values():
            block.forward = _Recomputed(block.forward, work.step)
    if pieces.head:
        head = work.module.get_submodule(pieces.head)
        head.forward = _Unforming(head.forward)


class _Recomputed:
    """A block's forward, of which the inputs alone are kept; dropout is drawn the second time as the first."""

    def __init__(self, forward: Callable[..., Any], step: KeyedStep) -> None:
        self.forward, self.step = forward, step

    def __call__(self, *args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **named)
        drawn = self.step.draws

        def again(*args: Any, **named: Any) -> Any:
            self.step.draws = drawn
            return self.forward(*args, **named)

        return checkpoint(again, *args, use_reentrant=False, preserve_rng_state=self.step.seeded, **named)


class _Unforming:
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        self.forward = forward

    def __call__(self, hidden: Tensor) -> Unformed:
        return Unformed(hidden, self.forward)


def repeated_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost blocks that stand in a row with others of their class, by their paths.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> list(repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([block(), block()]))))
    ['1.0', '1.1']
    """
    found: dict[str, nn.Module] = {}
    for path, row in module.named_modules():
        if not isinstance(row, nn.ModuleList | nn.Sequential) or any(f"{path}.".startswith(f"{one}.") for one in found):
            continue
        inner = {name: block for name, block in row.named_children() if next(block.children(), None) is not None}
        kinds = [type(block) for block in inner.values()]
        for name, block in inner.items():
            if kinds.count(type(block)) > 1 and any(True for _ in block.parameters()):
                found[f"{path}.{name}" if path else name] = block
    return found


def batch_gradients(
    run: Callable[[Samples], Any], work: WorkingCopy, loss: Loss, pieces: StepPieces, x: Samples, y: Tensor,
    params: list[Tensor],
) -> tuple[Tensor, float, list[Tensor]]:  # fmt: skip
    """The mean loss of a batch, what it counts in a mean of batches, and the gradients. `run` calls the model."""
    weights = sample_weights(loss, y)
    counted = float(len(y)) if weights is None else float(weights.sum())
    size = len(y) if pieces.microbatch is None else pieces.microbatch
    if size >= len(y):
        mean = batch_mean(_losses(loss, run(x), y), weights)
        return mean, counted, gradients(mean, params)
    grads, parts = [torch.zeros_like(p) for p in params], []
    for first in range(0, len(y), size):
        rows = slice(first, min(first + size, len(y)))
        work.step.begin(work.step.key, rows=rows)
        losses = _losses(loss, run(x[rows]), y[rows])
        part = (losses if weights is None else losses * weights[rows]).sum() / max(counted, 1)
        grads = [so_far + more for so_far, more in zip(grads, gradients(part, params), strict=True)]
        parts.append(part.detach())
    return torch.stack(parts).sum(), counted, grads


def _losses(loss: Loss, output: Any, y: Tensor) -> Tensor:
    return cross_entropy_in_parts(output, y) if isinstance(output, Unformed) else sample_losses(loss, output, y)


def cross_entropy_in_parts(output: Unformed, y: Tensor) -> Tensor:
    """`cross_entropy` of sequences `y [B, T]`; logits are formed for a few of the tokens that count, and again for the
    gradient.

    >>> hidden, y, head = torch.randn(2, 3, 4), torch.tensor([[1, 0, -100], [2, 2, 2]]), nn.Linear(4, 3)
    >>> from sparing.train.losses import cross_entropy
    >>> torch.allclose(cross_entropy_in_parts(Unformed(hidden, head), y), cross_entropy(head(hidden), y), atol=1e-6)
    True
    """
    counts = (y != IGNORED).flatten()
    places = counts.nonzero()[:, 0]
    hidden, target = output.hidden.flatten(0, -2).index_select(0, places), y.flatten().index_select(0, places)
    if not len(places):
        return output.hidden.flatten(1).sum(1) * 0.0

    def part(hidden: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.head(hidden).float(), target, reduction="none")

    with torch.no_grad():
        words = output.head(hidden[:1]).shape[-1]
    rows = max(1, LOGITS_AT_ONCE // (4 * words))
    pairs = zip(hidden.split(rows), target.split(rows), strict=True)
    found = torch.cat([checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs])  # type: ignore[arg-type]
    every = torch.zeros(len(counts), dtype=found.dtype, device=found.device).index_copy(0, places, found)
    return every.view(len(y), -1).sum(1) / counts.view(len(y), -1).sum(1).clamp(min=1)
