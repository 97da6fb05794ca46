"""Tensors on their way between a host and its GPU, for which neither waits longer than it must."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor

from sparing.accel.compiled.row_bodies import cleared_rows
from sparing.core import ops, tree


def fast_place(x: Tensor, device: torch.device) -> Tensor:
    """`ops.place`; the host does not wait until the device has come so far."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)


@lru_cache(maxsize=256)
def fast_constants(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """`ops.constants`, brought there once, since a copy is waited for."""
    return torch.tensor(numbers, dtype=torch.int64).to(device)


def fast_to_host(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """`ops.to_host`, all tensors of a device in one copy; it is waited for by whoever calls what this gives."""
    there = [i for i, x in enumerate(tensors) if x.is_cuda]
    if not there:
        return ops.to_host.plain(tensors)
    there.sort(key=lambda i: -tensors[i].element_size())  # so that each can be looked at where it stands
    bits = [tensors[i].contiguous().view(-1).view(torch.uint8) for i in there]
    joined = torch.cat(bits)
    here = torch.empty(joined.shape, dtype=torch.uint8, pin_memory=True)
    here.copy_(joined, non_blocking=True)
    came = torch.cuda.Event()
    came.record()

    def arrived() -> list[Tensor]:
        came.synchronize()
        out = list(tensors)
        for i, part in zip(there, here.split([len(some) for some in bits]), strict=True):
            out[i] = part.view(tensors[i].dtype).view(tensors[i].shape)
        return out

    return arrived


def fast_cleared(value: Tensor, mask: Tensor | None) -> Tensor:
    """`tree.cleared` with a zero that is made once: on a device it would be an operation each time."""
    if mask is None:
        return value
    if not value.is_cuda:
        found = cleared_rows(value, mask)
        return tree.cleared.plain(value, mask) if found is None else found
    return torch.where(mask, value, _zero(value.dtype, value.device))


@cache
def _zero(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device)
