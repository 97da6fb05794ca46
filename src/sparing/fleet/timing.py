"""A virtual clock: how long clients take on their own links and devices, from the bytes really counted.

    latency + download / down + samples visited / speed + latency + upload / up

A rate that no client declares costs no time. All of it is elementwise in float64, so that whoever shares a chunk with a
client changes nothing.

    >>> capacity = {"up": torch.tensor([1.0]), "down": torch.tensor([8.0]), "speed": torch.tensor([100.0])}
    >>> n, down = torch.tensor([50]), torch.tensor([1_000_000])
    >>> began = seconds_until_upload(0.5, Local((Phase(epochs=2),)), capacity, n, down)
    >>> began, began + seconds_for("up", capacity, torch.tensor([250_000]))
    (tensor([3.], dtype=torch.float64), tensor([5.], dtype=torch.float64))
"""

import torch
from torch import Tensor

from sparing.core.method import Local, Phase

UNITS_PER_SECOND = {"up": 125_000.0, "down": 125_000.0, "speed": 1.0}
"""Links are declared in Mbit/s, which is so many bytes a second; speed in samples a second."""

DeclaredCapacity = dict[str, Tensor]  # what devices declare, each [K]


def seconds_for(what: str, capacity: DeclaredCapacity, amount_K: Tensor) -> Tensor:
    """Seconds to move so many bytes, or to train on so many samples: `[K]` float64."""
    amount = amount_K.double()
    return amount / (capacity[what].double() * UNITS_PER_SECOND[what]) if what in capacity else torch.zeros_like(amount)


def seconds_until_upload(
    latency: float, local: Local, capacity: DeclaredCapacity, n_K: Tensor, down_K: Tensor
) -> Tensor:
    """Seconds until the first byte of each upload arrives: `[K]` float64."""
    got = latency + seconds_for("down", capacity, down_K)
    return got + seconds_for("speed", capacity, samples_visited(local, n_K)) + latency


def upload_bytes_in_time(deadline: float, capacity: DeclaredCapacity, ready_K: Tensor) -> Tensor:
    """The most bytes that each of these can upload by the deadline: `[K]` float64, whole numbers.

    An upload of exactly so many bytes is in time.
    """
    left = (deadline - ready_K).clamp(min=0)
    return (left * (capacity["up"].double() * UNITS_PER_SECOND["up"])).floor()


def samples_visited(local: Local, n_K: Tensor) -> Tensor:
    """How many samples pass through training in a round, over all phases and both models where there are two.

    >>> samples_visited(Local((Phase(epochs=2, batch=4), Phase(steps=4, batch=4))), torch.tensor([10, 3]))
    tensor([34, 18])
    """
    total = torch.zeros_like(n_K)
    for phase in local.phases + local.wrapped_phases:
        total = total + _samples_in_phase(phase, n_K)
    return total


def _samples_in_phase(phase: Phase, n_K: Tensor) -> Tensor:
    if phase.steps is None:
        return phase.epochs * n_K
    each = -(-n_K // phase.batch)  # the last batch of an epoch may be short
    return phase.steps // each * n_K + phase.steps % each * phase.batch
