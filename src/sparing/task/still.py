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
def intra_op(threads: int) -> Iterator[None]:
    """So many threads within one operation. With one, sums have the same bits on any machine of its kind."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
