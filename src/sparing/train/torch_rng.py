"""Torch's random state: left as it was found, and one model at a time for those that draw from it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import nn

from sparing.core.errors import TrainingError

_T = TypeVar("_T")


def seed_torch(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def own_rng(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


class RngGate:
    """Threads side by side, or one alone. Torch's generator is one for the process, so this is too.

    Once nobody is in side by side any more, the generator is as the first of them found it.
    """

    def __init__(self) -> None:
        self.turn, self.inside = threading.Condition(), 0
        self.still = torch.default_generator.get_state()

    @contextmanager
    def side_by_side(self) -> Iterator[None]:
        with self.turn:
            if not self.inside:
                self.still = torch.default_generator.get_state()
            self.inside += 1
        try:
            yield
        finally:
            with self.turn:
                self.inside -= 1
                if not self.inside:
                    torch.default_generator.set_state(self.still)
                    self.turn.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self.turn:
            self.turn.wait_for(lambda: not self.inside)
            yield

    def drawn(self) -> bool:
        """Whether somebody has drawn from the generator; ask while side by side."""
        return not torch.equal(torch.default_generator.get_state(), self.still)


GATE = RngGate()
DRAWING: WeakSet[nn.Module] = WeakSet()
"""Models that were seen drawing from torch's generator in training."""


def train_in_turn(model: nn.Module, device: torch.device, train: Callable[[bool], _T]) -> _T:
    """One client, while other threads may train others, unless the model is seen drawing from torch's generator.

    That is one for the whole process, so clients drawing from it side by side would disturb each other. `train` is told
    whether it is alone and has to seed the generator; what it did while somebody drew does not count.
    """
    if device.type == "cpu" and model not in DRAWING:
        with GATE.side_by_side():
            try:
                out = train(False)
            except TrainingError:
                if not GATE.drawn():
                    raise
            else:
                if not GATE.drawn():
                    return out
            DRAWING.add(model)
    with GATE.alone(), own_rng(device):
        return train(True)
