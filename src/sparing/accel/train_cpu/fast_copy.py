"""Working copies whose layers are recast and laid out so that one client at a time takes less time."""

from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparing.accel.keyed_classes import LoopNorm, recast_keyed_layers
from sparing.accel.train_cpu.chains import recast_chains, turn_back
from sparing.accel.train_cpu.convolutions import recast_convolutions
from sparing.accel.train_cpu.held_steps import Held
from sparing.accel.train_cpu.outer_sgd import OuterLayer, look_around, recast_dense
from sparing.core.tree import Tree
from sparing.train.keyed_layers import looks_at_batches
from sparing.train.working_copy import (
    EVALUATED_AT_ONCE,
    WorkingCopy,
    copied_module,
    described_copy,
    load_tensor,
    reset_buffers,
    row_of_client,
    save_row,
)

HEAVY = 1 << 20
"""Weights of a large convolution."""
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
WIDE = 2048
"""Samples evaluated at once on a GPU, which takes about as long for more; not where those of a batch see each other."""


class FastCopy(NamedTuple):
    work: WorkingCopy
    outer: list[OuterLayer]  # large layers, whose weights may move by factors
    held: dict[str, Held]  # weights that are not in the module, by their names


def fast_copy(model: nn.Module, device: torch.device, static: bool) -> FastCopy:
    """In training mode."""
    module = copied_module(model, device)
    step = recast_keyed_layers(module, stacked=False, static=static)
    last = likes_channels_last(module)
    recast_chains(module)
    outer: list[OuterLayer] = [*recast_dense(module), *recast_convolutions(module)]
    look_around(outer, module)
    if last:
        for x in (*module.parameters(), *module.buffers()):
            x.data = x.data.to(memory_format=torch.channels_last) if x.ndim == 4 else x.data
        for layer in module.modules():
            if isinstance(layer, POOLS):
                layer.register_forward_hook(_turn_pooled)
    work = described_copy(module, step, device)
    return FastCopy(work._replace(lay_out=_channels_last) if last else work, outer, {})


def likes_channels_last(module: nn.Module) -> bool:
    """Measured on one core: 1.1 to 1.35 times as fast, 1.03 for ResNet-18 with BatchNorm.

    With GroupNorm, which is slower so, ResNet-18 and VGG-11 lose 4 %: gradients of large weights are turned round.
    """
    convs = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    grouped = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
    return bool(convs) and not (grouped and max(conv.weight.numel() for conv in convs) >= HEAVY)


def _turn_pooled(layer: nn.Module, args: object, output: Tensor) -> None:
    if isinstance(output, Tensor):
        turn_back(output)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


@torch.no_grad()
def load_fast_row(fast: FastCopy, tree: Tree, k: int) -> None:
    """Put client k's row into the module; held weights are only looked at."""
    reset_buffers(fast.work)
    for name, x in fast.work.state.items():
        if name in fast.held:
            fast.held[name].begin(row_of_client(tree[name], k))
        else:
            load_tensor(fast.work, name, x, row_of_client(tree[name], k))


@torch.no_grad()
def save_fast_row(fast: FastCopy, start: Tree, tree: Tree, k: int, lent: Container[str] = ()) -> None:
    """Write the module's state into row k; where weights are held, what training added to client k's start."""
    if not fast.held:
        save_row(fast.work, tree, k, lent)
        return
    now = fast.work.module.state_dict(keep_vars=True)
    for name in fast.work.alias:
        if name in fast.held:
            fast.held[name].added(tree[name][k])
        else:
            torch.sub(now[name], row_of_client(start[name], k), out=tree[name][k])


def frozen_fast_copy(model: nn.Module, device: torch.device, static: bool) -> WorkingCopy:
    """In evaluation mode."""
    work = fast_copy(model, device, static).work
    work.module.eval()
    for layer in work.module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_mean is None:
            layer.train(isinstance(layer, LoopNorm))  # the same statistics, but torch refuses a single value elsewhere
    wide = device.type == "cuda" and not looks_at_batches(model, static)
    return work._replace(width=WIDE if wide else EVALUATED_AT_ONCE)


FROZEN: "WeakKeyDictionary[nn.Module, list[tuple[tuple, WorkingCopy]]]" = WeakKeyDictionary()
"""Frozen copies that nobody uses now, and what their models were like: making one takes milliseconds."""


@contextmanager
def lend_frozen(model: nn.Module, device: torch.device, static: bool) -> Iterator[WorkingCopy]:
    """A frozen copy, for the time being."""
    copies, now = FROZEN.setdefault(model, []), (copied_facts(model, device), static)
    known, work = copies.pop() if copies else (None, None)
    if work is None or known != now:
        work = frozen_fast_copy(model, device, static)
    yield work
    copies.append((now, work))


def copied_facts(model: nn.Module, device: torch.device) -> tuple:
    """What a working copy takes over from its model, beside the shapes."""
    layers = tuple((type(layer), layer.extra_repr(), layer.training) for layer in model.modules())
    state, first = list(model.state_dict(keep_vars=True).values()), {}
    tied = tuple(first.setdefault(id(x), i) for i, x in enumerate(state))
    return device, layers, tied, tuple((x.shape, x.dtype, x.requires_grad) for x in state)
