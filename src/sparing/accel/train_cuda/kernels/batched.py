"""What vmap rules have in common."""

from typing import Any

from torch import Tensor


def in_front(info: Any, dims: Any, *tensors: Any) -> tuple[Any, ...]:
    """The client axis in front of every tensor; those that are the same for all clients are repeated without a copy."""
    if dims is None:  # they have it
        return tensors
    return tuple(
        x if not isinstance(x, Tensor) else x.expand(info.batch_size, *x.shape) if at is None else x.movedim(at, 0)
        for x, at in zip(tensors, dims, strict=False)
    )


def axes_apart(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """One client's, without the axis."""
    return tuple(x[0] for x in tensors)
