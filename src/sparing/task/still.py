"""Leaving the process as it was found: torch's random state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_all(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def own_rng(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
