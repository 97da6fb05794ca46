"""Rows cut into stretches, such as the layers of a model, and those into blocks that a kernel looks at."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class StretchBlocks(NamedTuple):
    """Int32 tables on the device: of every block, and of every stretch."""

    stretch: Tensor  # [B] to which stretch a block belongs
    start: Tensor  # [B] its first column
    stop: Tensor  # [B] where its stretch ends
    first: Tensor  # [S + 1] the first block of a stretch; at the end, how many there are


@lru_cache(maxsize=64)
def stretch_blocks(lengths: tuple[int, ...], block: int, device: torch.device) -> StretchBlocks:
    """Every stretch has at least one block."""
    stretch, start, stop, first, at = [], [], [], [0], 0
    for s, n in enumerate(lengths):
        for i in range(0, max(n, 1), block):
            stretch.append(s)
            start.append(at + i)
            stop.append(at + n)
        at += n
        first.append(len(stretch))
    return StretchBlocks(*(torch.tensor(x, dtype=torch.int32).to(device) for x in (stretch, start, stop, first)))
