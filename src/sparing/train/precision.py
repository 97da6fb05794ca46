"""How exactly a device multiplies."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def multiplying_as(precision: str) -> Iterator[None]:
    """On CUDA: float32 as it is written, or with the 10 bits of TF32 in every factor ("tf32", "bf16").

    Convolutions add up in an order that does not change from one call to the next.
    """
    backends: tuple[Any, ...] = torch.backends.cuda.matmul, torch.backends.cudnn
    before, steady = [backend.allow_tf32 for backend in backends], torch.backends.cudnn.deterministic
    try:
        for backend in backends:
            backend.allow_tf32 = precision != "float32"
        torch.backends.cudnn.deterministic = True
        yield
    finally:
        torch.backends.cudnn.deterministic = steady
        for backend, was in zip(backends, before, strict=True):
            backend.allow_tf32 = was


def multiplying_on(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """The same where the device is one that it is about: on a CPU, threads side by side leave these settings alone."""
    return nullcontext() if device.type == "cpu" else multiplying_as(precision)
