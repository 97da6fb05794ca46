"""Optimisers of torch.optim by name, for paths that train one client after the other."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sparing.core.errors import ConfigError
from sparing.core.optimiser import Optimiser, refuse_unknown_optimiser

_NEED_MORE = ("Optimizer", "LBFGS", "SparseAdam")
"""The base class, one that calls the loss again, and one for sparse gradients."""


def optimiser_classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Every class of torch.optim that a list of gradients is enough for, by its name in small letters."""
    found = {name: one for name, one in vars(torch.optim).items() if isinstance(one, type) and name not in _NEED_MORE}
    return {name.lower(): one for name, one in found.items() if issubclass(one, torch.optim.Optimizer)}


def is_of_torch(optimiser: Optimiser) -> bool:
    """Whether it takes torch's own class."""
    return not optimiser.known_everywhere


def check_optimiser(optimiser: Optimiser, where: str) -> None:
    """Refuse what no class of torch.optim is called, or is told."""
    if not is_of_torch(optimiser):
        return
    refuse_unknown_optimiser(optimiser, optimiser_settings(), where)
    torch_optimiser(optimiser, [torch.zeros(2, 2)])


def optimiser_settings() -> dict[str, list[str]]:
    """What each of these classes takes."""
    return {name: list(inspect.signature(one).parameters) for name, one in optimiser_classes().items()}


def torch_optimiser(optimiser: Optimiser, params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """A fresh one for these parameters, which it overwrites."""
    make = optimiser_classes()[optimiser.name]
    settings: dict[str, Any] = {"lr": optimiser.lr, **optimiser.asked_settings}
    if "weight_decay" in inspect.signature(make).parameters:
        settings.setdefault("weight_decay", optimiser.weight_decay)
    try:
        return make(list(params), **settings)
    except (TypeError, ValueError) as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigError(f"torch's {make.__name__} does not take these settings ({said}): change local.*") from error


class TorchMemory(dict[str, list[Tensor]]):
    """An optimiser's memory that torch itself keeps."""

    def __init__(self, optimiser: Optimiser, params: Sequence[Tensor]) -> None:
        super().__init__()
        self.params = list(params)
        self.made = torch_optimiser(optimiser, params) if params else None

    def step(self, grads: Sequence[Tensor]) -> None:
        if self.made is None:
            return
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad
        self.made.step()
