"""Tensors of the host as arrays for compiled loops, and loops over rows dealt to the threads of an operation."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sparing.accel.host_workers import host_workers

FEW = 1 << 14
"""Numbers up to which one thread is enough."""


def on_host(*tensors: Tensor | None) -> bool:
    """Whether they are float32 tensors of the host with entries, as loops take them; a product is none."""
    return all(can_loop(x) and x.dtype == torch.float32 and x.numel() > 0 for x in tensors if x is not None)


def can_loop(x: Tensor) -> bool:
    """Whether this is a tensor of the host of which no gradients are recorded."""
    return type(x) is Tensor and x.device.type == "cpu" and not (x.requires_grad and torch.is_grad_enabled())


def rows_of(x: Tensor) -> np.ndarray:
    """`[K, ...]` as `[K, n]`, or as `[1, n]` where one row is shown many times; copied only where it is not whole.

    >>> rows_of(torch.ones(1, 2, 3).expand(5, -1, -1)).shape
    (1, 6)
    """
    x = x[:1] if x.shape[0] > 1 and x.stride(0) == 0 else x
    return x.detach().reshape(len(x), math.prod(x.shape[1:])).contiguous().numpy()


def bits_of(x: Tensor) -> np.ndarray:
    """Float32 numbers as `rows_of` gives them, seen as whole ones."""
    return rows_of(x).view(np.int32)


def mask_rows(mask: Tensor, like: Tensor) -> np.ndarray:
    """A mask that broadcasts to the tensor, as int8 `[K or 1, n]` of zeros and ones."""
    return rows_of(mask if mask.shape[1:] == like.shape[1:] else mask.expand(-1, *like.shape[1:])).view(np.int8)


def deal_rows(loop: Callable[[int, int], object], rows: int, numbers: int) -> None:
    """`loop(first, last)` over all rows, in stretches on as many threads as work within one operation.

    What no worker has begun when this thread is done is done here: they may be waiting for this very operation, or have
    stayed behind where this process was forked.
    """
    threads = min(torch.get_num_threads(), rows) if numbers > FEW else 1
    if threads < 2:
        loop(0, rows)
        return
    cuts = list(pairwise([rows * i // threads for i in range(threads + 1)]))
    others = [host_workers().submit(loop, *cut) for cut in cuts[1:]]
    loop(*cuts[0])
    for cut, other in zip(cuts[1:], others, strict=True):
        if other.cancel():
            loop(*cut)
        else:
            other.result()
