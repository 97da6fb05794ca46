"""The normalisations that the deep networks can be built with."""

import math
from typing import Literal

from torch import Tensor, nn

Norm = Literal["group", "batch", "static"]
_NORM_GROUPS = 32


def norm2d(kind: Norm, channels: int) -> nn.Module:
    """One of three layers, with the same parameters (a weight and a bias per channel).

    `group`: GroupNorm; a sample is normalised by itself, so clients, batch sizes and evaluation cannot disturb it.
    There are 32 groups, as its authors advise, or as many as leave two channels to each: with one channel, a map of
    1x1 would be normalised to nothing. `batch`: BatchNorm with running statistics, which are buffers. `static`:
    BatchNorm by the statistics of the batch at hand, in evaluation too; there are no buffers.

    >>> norm2d("group", 64).num_groups, norm2d("group", 512).num_groups, norm2d("group", 8).num_groups
    (32, 32, 4)
    """
    if kind == "group":
        return nn.GroupNorm(math.gcd(_NORM_GROUPS, max(channels // 2, 1)), channels)
    return nn.BatchNorm2d(channels, track_running_stats=kind == "batch")


class MeanPool(nn.Module):
    """The mean over all places of an image: `[B, C, H, W]` -> `[B, C]`."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))
