"""The grid on which all partial sums of a round agree, so that adding is exact.

Every tensor has a largest update, a power of two that follows from its largest weight; weights of clients lie on a grid
of their own, so that their sums are exact too.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import TrainingError, UploadError
from sparing.core.ops import bounds, constants
from sparing.core.tree import Tree

REACH = 2.0**16  # largest update of a float tensor, as a multiple of max(1, its largest weight)
COUNTS = 2.0**32  # largest update of an integer tensor
MANTISSA = (1 << 52) - 1  # the bits of a float64 below its exponent
GRID_STEP = 2.0**-51  # of terms, by the largest update of their tensor
WEIGHT_GRID = 2.0**-29  # 29 bits times the 24 of a float32: their product is exact


class Limits(NamedTuple):
    """The largest update that each tensor of a model may get in a round, a power of two."""

    names: tuple[str, ...]
    largest: Tensor  # [tensors] float64


class Grid:
    """The largest update of each tensor of a model, and what the weights of a cohort add up to at most."""

    def __init__(self, limits: Limits, total_weight: float):
        self.scale = power_above(total_weight)
        self.places = {name: i for i, name in enumerate(limits.names)}
        self.limits = limits.largest

    def limit(self, name: str) -> Tensor:
        """The largest update of this tensor, a power of two."""
        return self.limits[self.places[name]]

    def shares(self, weight_K: Tensor, ctx: Ctx) -> Tensor:
        """Weights as parts of the scale, float64."""
        fine_K = weight_K.clamp(0, self.scale) == weight_K

        def too_heavy() -> TrainingError:
            k = int((~fine_K).nonzero()[0])
            return TrainingError(
                f"client {int(ctx.ids[k])} was given weight {float(weight_K[k]):.3g}; weights lie between 0 and "
                f"{self.scale:.3g}, from `Weigh.most`: check the samples it reported and the weighting"
            )

        ctx.require(fine_K, too_heavy)
        return (weight_K.double() * (1 / self.scale / WEIGHT_GRID)).round_().mul_(WEIGHT_GRID)  # powers of two: exact

    def require_within(self, update: Tree, ctx: Ctx) -> None:
        """Every update must be finite and no larger than its limit."""
        names = list(update)
        limits = self.limits[constants(tuple(self.places[name] for name in names), self.limits.device)]
        within = bounds(update) <= limits

        def too_large() -> UploadError | None:
            looked_at = (self.offender(update, names[i], ctx) for i in (~within).nonzero()[:, 0].tolist())
            return next((error for error in looked_at if error is not None), None)

        if names:
            ctx.require(within, too_large)

    def offender(self, update: Tree, name: str, ctx: Ctx) -> UploadError | None:
        """Whose update of this tensor is too large; nobody's, where a bound on them was."""
        sizes, limit = bounds({str(k): row for k, row in enumerate(update[name])}).tolist(), float(self.limit(name))
        for k, size in enumerate(sizes):
            if not size <= limit:
                return beyond_grid(int(ctx.ids[k]), size, name, limit, ctx)
        return None


def beyond_grid(client: int, size: float, name: str, limit: float, ctx: Ctx) -> UploadError:
    return UploadError.of(
        client,
        f"client {client} sent an update of size {size:.3g} for {name!r} in round {ctx.round}, beyond {limit:.3g}; "
        "lower local.lr or set local.clip",
    )


def power_above(x: float) -> float:
    return 2.0 ** math.ceil(math.log2(max(x, 1.0)))


def update_limits(model: Tree, sizes: Tensor) -> Limits:
    """From the largest magnitude of each tensor.

    >>> model = {"w": torch.tensor([[3.0]]), "n": torch.tensor([[3]])}
    >>> update_limits(model, bounds(model)).largest.tolist() == [REACH * 4, COUNTS]
    True
    """
    bits = sizes.clamp(min=1.0).view(torch.int64)
    found = bits.add_(MANTISSA).bitwise_and_(~MANTISSA).view(torch.float64).mul_(REACH)  # the next power of two
    counts = tuple(i for i, x in enumerate(model.values()) if not x.is_floating_point())
    if counts:
        found.index_fill_(0, constants(counts, found.device), COUNTS)
    return Limits(tuple(model), found)


def limits_of(model: Tree) -> Limits:
    return update_limits(model, bounds(model))
