"""A working copy of a model: what is trained and evaluated, so that the model handed in never changes."""

import copy
from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparing.core.errors import ConfigError, nearest_name
from sparing.core.method import Phase
from sparing.core.tree import Tree
from sparing.data.inputs import Inputs, Samples, SomeSamples
from sparing.train.keyed_layers import KeyedStep, hook_keyed_layers

EVALUATED_AT_ONCE = 512
"""Samples in a batch of evaluation, at most."""


_EVALUATED_BYTES = 1 << 28
"""Of the widest layer's outputs for them, where samples are tokens."""


def _as_it_is(x: Tensor) -> Tensor:
    return x


class WorkingCopy(NamedTuple):
    module: nn.Module
    step: KeyedStep
    state: dict[str, Tensor]  # the module's own tensors, each once
    alias: dict[str, str]  # every state_dict name -> the name in `state` under which that tensor stands
    scratch: list[tuple[Tensor, Tensor]]  # buffers that are not in the state_dict, and what they start as
    params: frozenset[str]  # of `state`: those that may be trained
    device: torch.device
    lay_out: Callable[[Tensor], Tensor] = _as_it_is  # samples, as the module likes them in memory
    width: int = EVALUATED_AT_ONCE  # samples that it is evaluated on at once


def copied_module(model: nn.Module, device: torch.device) -> nn.Module:
    """In training mode. Frozen parameters are looked at where they are: a base is held once, however many copies."""
    frozen = (p for p in model.parameters() if not p.requires_grad and p.device == device)
    lent = {id(p): nn.Parameter(p.data, requires_grad=False) for p in frozen if type(p) is nn.Parameter}
    return copy.deepcopy(model, lent).to(device).train()  # type: ignore[arg-type]


def working_copy(model: nn.Module, device: torch.device, static: bool) -> WorkingCopy:
    """The user's own layers, in training mode; dropout and BatchNorm are hooked."""
    module = copied_module(model, device)
    return described_copy(module, hook_keyed_layers(module, static), device)


def described_copy(module: nn.Module, step: KeyedStep, device: torch.device) -> WorkingCopy:
    """What there is to know about a module that is nobody else's."""
    alias, state, seen = {}, {}, {}
    for name, x in module.state_dict(keep_vars=True).items():
        alias[name] = seen.setdefault(id(x), name)
        state.setdefault(alias[name], x)
    scratch = [(x, x.clone()) for x in module.buffers() if id(x) not in seen]
    params = frozenset(name for name, x in state.items() if isinstance(x, nn.Parameter) and x.requires_grad)
    return WorkingCopy(module, step, state, alias, scratch, params, device)


def trained_names(work: WorkingCopy, phase: Phase) -> list[str]:
    """Names in `work.state` that move in this phase; parameters frozen by the model's author never do."""
    names = {name for name in work.alias if isinstance(work.state[work.alias[name]], nn.Parameter)}
    for name in sorted((phase.trains or frozenset()) - names):
        raise ConfigError(f"trains: the model has no parameter {name!r}: {nearest_name(name, names)}")
    chosen = names if phase.trains is None else phase.trains
    wanted = {work.alias[name] for name in chosen}
    return [name for name in work.state if name in wanted and name in work.params]


def trained_params(work: WorkingCopy, names: list[str]) -> list[Tensor]:
    """The parameters of these names, which from now on are the only ones with a gradient."""
    for name in work.params:
        work.state[name].requires_grad_(name in names)
    return [work.state[name] for name in names]


@torch.no_grad()
def load_row(work: WorkingCopy, tree: Tree, k: int) -> None:
    """Put client k's row into the module."""
    reset_buffers(work)
    for name, x in work.state.items():
        load_tensor(work, name, x, row_of_client(tree[name], k))


def load_tensor(work: WorkingCopy, name: str, x: Tensor, row: Tensor) -> None:
    """Trainable parameters and buffers are written to; frozen ones, which others may share, are pointed elsewhere."""
    if name in work.params or not isinstance(x, nn.Parameter):
        x.copy_(row)
    elif (x.stride(), x.dtype) == (row.stride(), row.dtype):
        x.data = row
    else:
        x.data = torch.empty_like(x).copy_(row)


def reset_buffers(work: WorkingCopy) -> None:
    """The module's own buffers stand in their places, and those that are not in the state_dict are as at first."""
    for name, x in work.state.items():
        if not isinstance(x, nn.Parameter):  # a forward may have put another tensor in its place
            owner, _, leaf = name.rpartition(".")
            work.module.get_submodule(owner)._buffers[leaf] = x
    for x, first in work.scratch:
        x.copy_(first)


@torch.no_grad()
def save_row(work: WorkingCopy, tree: Tree, k: int, lent: Container[str] = ()) -> None:
    """Write the module's state into row k, under every name but those of what is `lent`."""
    now = work.module.state_dict(keep_vars=True)
    for name in work.alias:
        if name not in lent:
            tree[name][k].copy_(now[name])


def row_of_client(x: Tensor, k: int) -> Tensor:
    """Client k's of `x [K or 1, ...]`."""
    return x[k if x.shape[0] > 1 else 0]


def gathered_samples(x: SomeSamples, places: Tensor, work: WorkingCopy) -> SomeSamples:
    """These samples in fresh memory, as the module likes them laid out."""
    taken = x.index_select(0, places).to(work.device)
    return taken.map(work.lay_out) if isinstance(taken, Inputs) else work.lay_out(taken)


def samples_at_once(work: WorkingCopy, x: Samples) -> int:
    """How many samples to evaluate in one batch: of sequences of tokens fewer, as each has all outputs at every place.

    >>> module = nn.Sequential(nn.Embedding(1000, 8), nn.Linear(8, 100_000))
    >>> work = described_copy(module, KeyedStep(), torch.device("cpu"))
    >>> samples_at_once(work, torch.zeros(9, 64, dtype=torch.int64)), samples_at_once(work, torch.zeros(9, 64))
    (10, 512)
    """
    first = x.tensors[0] if isinstance(x, Inputs) else x
    if first.is_floating_point() or first.ndim != 2:
        return work.width
    widest = max((one.out_features for one in work.module.modules() if isinstance(one, nn.Linear)), default=1)
    return max(1, min(work.width, _EVALUATED_BYTES // (4 * first.shape[1] * widest)))


def check_names(model: nn.Module, tree: Tree) -> None:
    for name, x in model.state_dict(keep_vars=True).items():
        if name not in tree:
            raise ConfigError(f"start lacks {name!r}, which the model has: {nearest_name(name, tree)}")
        if tree[name].shape[1:] != x.shape:
            raise ConfigError(f"start has {name!r} of shape {tuple(tree[name].shape[1:])}, the model {tuple(x.shape)}")


def device_of_tree(tree: Tree) -> torch.device:
    return next(iter(tree.values())).device if tree else torch.device("cpu")
