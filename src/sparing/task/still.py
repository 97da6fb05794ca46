"""Leaving the process as it was found: torch's random state and its number of threads."""

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


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread: sums over several are not the same bits, and clients are what there is plenty of."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
