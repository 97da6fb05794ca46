"""Torch's random state: left as it was found, and one model at a time for those that draw from it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import nn


def seed_all(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def own_rng(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


class Gate:
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


GATE = Gate()
DRAWING: WeakSet[nn.Module] = WeakSet()
"""Models that were seen drawing from torch's generator in training."""
