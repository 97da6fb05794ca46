"""What takes many operations of torch, as Triton kernels for a GPU: all layers and clients at once.

Every kernel has a plain path beside it, in the module that calls it, for CPUs and machines without Triton; with the
same bits, but for the products of `factors` and the sums of `spread`, where only the batch makes no difference.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def found() -> bool:
    return find_spec("triton") is not None


def ready(x: Tensor) -> bool:
    """Whether the kernels can take this tensor."""
    return x.is_cuda and found()


@lru_cache(maxsize=4)
def stretched(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """For every number of a row that joins tensors of these sizes, which tensor it is in."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).to(device)


@lru_cache(maxsize=256)
def constants(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """These numbers on a device, `[n]` int64; brought there once, since a copy is waited for."""
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def place(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on its way to a device; the host does not wait until the device has come so far."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)


def carried_together(rows: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The same of several rows of numbers, to a GPU in one copy; those of wider numbers come first."""
    if device.type != "cuda":
        return [x.to(device) for x in rows]
    bits = [x.contiguous().view(torch.uint8) for x in rows]
    far = place(torch.cat(bits), device).split([len(some) for some in bits])
    return [some.view(x.dtype) for some, x in zip(far, rows, strict=True)]


def fetched(x: Tensor) -> Callable[[], Tensor]:
    """A tensor on its way to the host; what this gives waits for it."""
    if not x.is_cuda:
        return lambda: x
    here = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    here.copy_(x, non_blocking=True)
    came = torch.cuda.Event()
    came.record()

    def arrived() -> Tensor:
        came.synchronize()
        return here

    return arrived
