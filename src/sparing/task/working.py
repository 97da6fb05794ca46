"""A working copy of a model: what local training runs, so that the model handed in never changes."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparing.core.errors import ConfigError, nearest
from sparing.core.protocols import Phase
from sparing.core.tree import Tree
from sparing.task.chain import recast_chains, turn_back
from sparing.task.conv import recast_convolutions
from sparing.task.held import Held
from sparing.task.keyed import Step, recast
from sparing.task.outer import Outer, look_around, recast_dense

HEAVY = 1 << 20
"""Weights of a large convolution."""
POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


class Working(NamedTuple):
    module: nn.Module
    step: Step
    state: dict[str, Tensor]  # the module's own tensors, each once
    alias: dict[str, str]  # every state_dict name -> the name in `state` under which that tensor stands
    scratch: list[tuple[Tensor, Tensor]]  # buffers that are not in the state_dict, and what they start as
    params: frozenset[str]  # of `state`: those that may be trained
    outer: list[Outer]  # large layers, whose weights may move by factors; none where stacked
    channels_last: bool
    device: torch.device
    held: dict[str, Held]  # weights that are not in `module`, by their names


def working_copy(model: nn.Module, device: torch.device, stacked: bool, static: bool) -> Working:
    module = copy.deepcopy(model).to(device).train()
    step = recast(module, stacked, static)
    last = not stacked and likes_channels_last(module)
    outer: list[Outer] = []
    if not stacked:
        recast_chains(module)
        outer = [*recast_dense(module), *recast_convolutions(module)]
        look_around(outer, module)
    if last:
        for x in (*module.parameters(), *module.buffers()):
            x.data = x.data.to(memory_format=torch.channels_last) if x.ndim == 4 else x.data
        for layer in module.modules():
            if isinstance(layer, POOLS):
                layer.register_forward_hook(pooled)
    alias, state, seen = {}, {}, {}
    for name, x in module.state_dict(keep_vars=True).items():
        alias[name] = seen.setdefault(id(x), name)
        state.setdefault(alias[name], x)
    scratch = [(x, x.clone()) for x in module.buffers() if id(x) not in seen]
    params = frozenset(name for name, x in state.items() if isinstance(x, nn.Parameter) and x.requires_grad)
    return Working(module, step, state, alias, scratch, params, outer, last, device, {})


def signature(model: nn.Module, device: torch.device) -> tuple:
    """What a working copy takes over from its model, beside the shapes."""
    layers = tuple((type(layer), layer.extra_repr(), layer.training) for layer in model.modules())
    state, first = list(model.state_dict(keep_vars=True).values()), {}
    tied = tuple(first.setdefault(id(x), i) for i, x in enumerate(state))
    return device, layers, tied, tuple((x.shape, x.dtype, x.requires_grad) for x in state)


def likes_channels_last(module: nn.Module) -> bool:
    """Measured on one core: 1.1 to 1.35 times as fast, 1.03 for ResNet-18 with BatchNorm.

    With GroupNorm, which is slower so, ResNet-18 and VGG-11 lose 4 %: gradients of large weights are turned round.
    """
    convs = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    grouped = any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
    return bool(convs) and not (grouped and max(conv.weight.numel() for conv in convs) >= HEAVY)


def pooled(layer: nn.Module, args: object, output: Tensor) -> None:
    if isinstance(output, Tensor):
        turn_back(output)


def trained(work: Working, phase: Phase) -> list[str]:
    """Names in `work.state` that move in this phase; parameters frozen by the model's author never do."""
    names = {name for name in work.alias if isinstance(work.state[work.alias[name]], nn.Parameter)}
    for name in sorted((phase.trains or frozenset()) - names):
        raise ConfigError(f"trains: the model has no parameter {name!r}: {nearest(name, names)}")
    chosen = names if phase.trains is None else phase.trains
    wanted = {work.alias[name] for name in chosen}
    return [name for name in work.state if name in wanted and name in work.params]


@torch.no_grad()
def load(work: Working, tree: Tree, k: int) -> None:
    """Put client k's row into the module."""
    for name, x in work.state.items():
        if not isinstance(x, nn.Parameter):  # a forward may have put another tensor in its place
            owner, _, leaf = name.rpartition(".")
            work.module.get_submodule(owner)._buffers[leaf] = x
        if name in work.held:
            work.held[name].begin(row_of(tree[name], k))
        else:
            x.copy_(row_of(tree[name], k))
    for x, first in work.scratch:
        x.copy_(first)


@torch.no_grad()
def save(work: Working, tree: Tree, k: int) -> None:
    """Write the module's state into row k, under every name."""
    now = work.module.state_dict(keep_vars=True)
    for name in work.alias:
        tree[name][k].copy_(now[name])


@torch.no_grad()
def save_added(work: Working, start: Tree, tree: Tree, k: int) -> None:
    """Write what training added to client k's start into row k."""
    now = work.module.state_dict(keep_vars=True)
    for name in work.alias:
        if name in work.held:
            work.held[name].added(tree[name][k])
        else:
            torch.sub(now[name], row_of(start[name], k), out=tree[name][k])


def row_of(x: Tensor, k: int) -> Tensor:
    """Client k's of `x [K or 1, ...]`."""
    return x[k if x.shape[0] > 1 else 0]


def gathered(x: Tensor, places: Tensor, work: Working) -> Tensor:
    """These samples in fresh memory, as the module likes them laid out."""
    x = x.index_select(0, places).to(work.device)
    return x.contiguous(memory_format=torch.channels_last) if work.channels_last and x.ndim == 4 else x


def check_names(model: nn.Module, tree: Tree) -> None:
    for name, x in model.state_dict(keep_vars=True).items():
        if name not in tree:
            raise ConfigError(f"start lacks {name!r}, which the model has: {nearest(name, tree)}")
        if tree[name].shape[1:] != x.shape:
            raise ConfigError(f"start has {name!r} of shape {tuple(tree[name].shape[1:])}, the model {tuple(x.shape)}")
