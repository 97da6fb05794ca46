"""How far updates may reach: the grids on which all partial sums of a round agree.

Every tensor has a largest update, a power of two that follows from its largest weight; weights of clients lie on a grid
of their own, so that their sums are exact too.
"""

import math
from functools import cached_property

import torch
from torch import Tensor

from sparing.core.errors import TrainingError, UploadError
from sparing.core.gpu import brought
from sparing.core.keys import Ctx
from sparing.core.later import doubt
from sparing.core.product import Product
from sparing.core.protocols import Arrival
from sparing.core.tree import Tree

REACH = 2.0**16  # largest update of a float tensor, as a multiple of max(1, its largest weight)
COUNTS = 2.0**32  # largest update of an integer tensor
MANTISSA = (1 << 52) - 1  # the bits of a float64 below its exponent
WEIGHT_GRID = 2.0**-29  # 29 bits times the 24 of a float32: their product is exact


class Grid:
    """What all partial sums of one round agree on: the largest update of each tensor, and the scale of weights."""

    def __init__(self, model: Tree, total_weight: float, sizes: Tensor | None = None):
        self.scale = power_above(total_weight)
        self.device = next((x.device for x in model.values()), torch.device("cpu"))
        self.places = {name: i for i, name in enumerate(model)}
        self.reach = reaches(model, sizes) if model else torch.zeros(0)  # [tensors] float64, on the device

    @cached_property
    def limit(self) -> dict[str, float]:
        return dict(zip(self.places, self.reach.tolist(), strict=True))

    def shares(self, weight_K: Tensor, ctx: Ctx) -> Tensor:
        """Weights as parts of the scale, float64 on the model's device."""

        def judge(weight_K: Tensor) -> None:
            if not len(weight_K) or (float(weight_K.min()) >= 0 and float(weight_K.max()) <= self.scale):
                return
            for k in (~((weight_K >= 0) & (weight_K <= self.scale))).nonzero()[:, 0].tolist():
                who, weight = int(ctx.here[0][k]), float(weight_K[k])
                raise TrainingError(
                    f"client {who} was given weight {weight:.3g}; weights lie between 0 and {self.scale:.3g}, what a "
                    "cohort may add up to: check the samples it reported and the weighting"
                )

        doubt(ctx.doubts, weight_K, judge)
        weight_K = weight_K.to(self.device, torch.float64, non_blocking=True)
        return (weight_K * (1 / self.scale / WEIGHT_GRID)).round_().mul_(WEIGHT_GRID)  # powers of two: exact

    def check(self, arrival: Arrival) -> None:
        """Every update must be finite and within the grid."""
        for (name, update), size in zip(arrival.update.items(), bounds(arrival.update).tolist(), strict=True):
            if not size <= self.limit[name]:
                self.refuse(name, update, arrival.ctx)

    def refuse(self, name: str, update: Tensor, ctx: Ctx) -> None:
        """Says whose update is too large; of a product it was a bound that may have been too high."""
        sizes = bounds(dict(enumerate(update)))  # type: ignore[arg-type]
        for i, size in zip(ctx.here[0].tolist(), sizes.tolist(), strict=False):
            if not size <= self.limit[name]:
                raise beyond(i, size, name, self.limit[name], ctx)


def beyond(client: int, size: float, name: str, limit: float, ctx: Ctx) -> UploadError:
    return UploadError.of(
        client,
        f"client {client} sent an update of size {size:.3g} for {name!r} in round {ctx.round}, beyond {limit:.3g}; "
        "lower local.lr or set local.clip",
    )


def bounds(tree: Tree) -> Tensor:
    """The largest magnitude of each tensor, or a bound on it: `[tensors]` float64; NaN if there is one."""
    if not tree:
        return torch.zeros(0, dtype=torch.float64)
    plain = {n: x for n, x in tree.items() if x.is_cuda and x.is_floating_point() and not isinstance(x, Product)}
    plain = {name: x for name, x in plain.items() if x.numel()}
    norms = torch._foreach_norm(list(plain.values()), math.inf, torch.float64) if plain else ()  # pyright: ignore
    found = dict(zip(plain, norms, strict=True))
    return torch.stack([found[name] if name in found else bound(x) for name, x in tree.items()])


def bound(x: Tensor) -> Tensor:
    """Of a product, no less than it; minimum and maximum carry NaN along."""
    if isinstance(x, Product):
        return x.at_most() if x.whole is None else bound(x.whole)
    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    low, high = torch.aminmax(x)
    return torch.maximum(-low.double(), high.double())


def power_above(x: float) -> float:
    return 2.0 ** math.ceil(math.log2(max(x, 1.0)))


def reaches(model: Tree, sizes: Tensor | None = None) -> Tensor:
    """The largest update of every tensor of this model, whose largest magnitudes may be known.

    >>> reaches({"w": torch.tensor([[3.0]]), "n": torch.tensor([[3]])}).tolist() == [REACH * 4, COUNTS]
    True
    """
    bits = (bounds(model) if sizes is None else sizes).clamp(min=1.0).view(torch.int64)
    found = bits.add_(MANTISSA).bitwise_and_(~MANTISSA).view(torch.float64).mul_(REACH)  # the next power of two
    counts = tuple(i for i, x in enumerate(model.values()) if not x.is_floating_point())
    if counts:
        found.index_fill_(0, brought(counts, found.device), COUNTS)
    return found
