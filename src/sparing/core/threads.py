"""How many threads work within one operation, for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def intra_op(threads: int) -> Iterator[None]:
    """So many threads within one operation. With one, sums have the same bits on any machine of its kind."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
