"""The exact fold: a weighted mean that does not depend on order, grouping or the number of workers.

Floating-point addition is exact as long as all terms lie on one power-of-two grid and the sum stays below 2^53 grid
steps. So every term w_k * u_k is rounded once, on its own, to a grid fixed at the start of the round, and the float64
accumulator only ever adds exactly. Memory: one float64 accumulator per tensor, one small block beside it, and a
second accumulator only where clients vote on different coordinates.

Updates that come as a `Product` are added up first, in one product for all clients of a call: quicker by far, and then
the last bits do depend on who is in the call, as those of such training do.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sparing.core.cover import Cover
from sparing.core.errors import TrainingError
from sparing.core.product import Product
from sparing.core.protocols import Arrival, Blended
from sparing.core.tree import Tree, flat, take

BLOCK = 1 << 16
FEW = 1 << 15  # values of all clients up to which the number of operations is what costs
REACH = 2.0**16  # largest update of a float tensor, as a multiple of max(1, its largest weight)
COUNTS = 2.0**32  # largest update of an integer tensor
WEIGHT_GRID = 2.0**-29  # 29 bits times the 24 of a float32: their product is exact


class Grid:
    """What all partial sums of one round agree on: the largest update of each tensor, and the scale of weights."""

    def __init__(self, model: Tree, total_weight: float):
        self.scale = power_above(total_weight)
        self.device = next((x.device for x in model.values()), torch.device("cpu"))
        self.limit = {name: reach(x, size) for (name, x), size in zip(model.items(), sizes_of(model), strict=True)}

    def shares(self, weight_K: Tensor, ids: list[int]) -> Tensor:
        """Weights as parts of the scale, on a grid of their own, so that sums of weights are exact too; on the CPU."""
        weight_K = weight_K.cpu()
        bad = ~((weight_K >= 0) & (weight_K <= self.scale))
        if bool(bad.any()):
            k = int(bad.nonzero()[0])
            raise TrainingError(
                f"client {ids[k]} was given weight {float(weight_K[k]):.3g}; weights lie between 0 and "
                f"{self.scale:.3g}, what a cohort may add up to: check the samples it reported and the weighting"
            )
        return torch.round(weight_K.double() / self.scale / WEIGHT_GRID) * WEIGHT_GRID

    def check(self, arrival: Arrival) -> None:
        """Every update must be finite and within the grid."""
        for (name, update), size in zip(arrival.update.items(), sizes_of(arrival.update), strict=True):
            if not size <= self.limit[name]:
                self.refuse(name, update, arrival)

    def refuse(self, name: str, update: Tensor, arrival: Arrival) -> None:
        sizes = [size_of(x) for x in update]  # of a product it was a bound that was too high
        for k in (k for k, size in enumerate(sizes) if not size <= self.limit[name]):
            raise TrainingError(
                f"client {int(arrival.ctx.ids[k])} sent an update of size {sizes[k]:.3g} for {name!r} in round "
                f"{arrival.ctx.round}, beyond {self.limit[name]:.3g}; lower local.lr or set local.clip"
            )


def sizes_of(tree: Tree) -> list[float]:
    """The largest magnitude of each tensor, or a bound on it; a device is waited for once."""
    return torch.stack([bound(x) for x in tree.values()]).tolist() if tree else []


def size_of(x: Tensor) -> float:
    return float(bound(x))


def bound(x: Tensor) -> Tensor:
    """The largest magnitude, of a product no less than it; NaN if there is one, since min and max carry it along."""
    if isinstance(x, Product):
        return x.at_most() if x.whole is None else bound(x.whole)
    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    if x.is_cuda and x.is_floating_point():
        return torch.linalg.vector_norm(x, math.inf).double()
    low, high = torch.aminmax(x)
    return torch.maximum(-low.double(), high.double())


def power_above(x: float) -> float:
    return 2.0 ** math.ceil(math.log2(max(x, 1.0)))


def reach(x: Tensor, size: float) -> float:
    """The largest update of a tensor of such values."""
    return REACH * power_above(size) if x.is_floating_point() else COUNTS


class Roll:
    """Who arrived, with which weight, and the scalars watched on the way: by id, reduced in id order at the end."""

    def __init__(self) -> None:
        self.weight: dict[int, float] = {}
        self.seen: dict[int, dict[str, Tensor]] = {}
        self.refused = 0  # arrivals that a lenient blend left out

    def add(self, ids: list[int], share_K: Tensor, seen: dict[str, Tensor]) -> None:
        self.refuse_twice(ids)
        for k, (i, share) in enumerate(zip(ids, share_K.tolist(), strict=True)):
            self.weight[i] = share
            self.seen[i] = {name: x[k] for name, x in seen.items()}

    def merge(self, other: "Roll") -> None:
        self.refuse_twice(sorted(other.weight))
        self.weight |= other.weight
        self.seen |= other.seen
        self.refused += other.refused

    def refuse_twice(self, ids: list[int]) -> None:
        known = set(self.weight)
        for i in ids:
            if i in known:
                raise TrainingError(f"client {i} arrived twice in one round; each client counts once")
            known.add(i)

    def in_order(self, device: torch.device) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(ids, weights, scalars), all in id order."""
        ids = sorted(self.weight)
        if not ids:
            raise TrainingError("no client arrived in this round; raise `sample` or check who is available")
        weight = torch.tensor([self.weight[i] for i in ids], dtype=torch.float64)
        if float(weight.sum()) > 2:
            raise TrainingError("the weights of this round add up to more than `Blend.most` said; scale them down")
        seen = {name: torch.stack([self.seen[i][name] for i in ids]) for name in self.seen[ids[0]]}
        return torch.tensor(ids).to(device, non_blocking=True), weight.to(device, non_blocking=True), seen


def sound(arrival: Arrival, grid: Grid, roll: Roll) -> Arrival:
    """Without the clients that sent something not finite or beyond the grid; they are counted."""
    fine_K = torch.ones_like(arrival.ctx.ids, dtype=torch.bool)
    for name, x in arrival.update.items():
        if x.numel():
            low, high = torch.aminmax(flat(x), dim=1)
            fine_K &= (low >= -grid.limit[name]) & (high <= grid.limit[name])
    for x in arrival.notes.values():
        fine_K &= flat(x).isfinite().all(dim=1)
    if bool(fine_K.all()):
        return arrival
    roll.refused += int((~fine_K).sum())
    index = fine_K.nonzero()[:, 0]
    scope = {name: m if m is None or m.shape[0] == 1 else m[index] for name, m in arrival.scope.items()}
    update, notes = take(arrival.update, index), take(arrival.notes, index)
    return Arrival(update, scope, notes, arrival.model, arrival.ctx.at(index))


def admitted(arrival: Arrival, weight_K: Tensor, seen: dict[str, Tensor], grid: Grid, roll: Roll) -> Tensor:
    """Everything checked before anything is added: the shares `[K]` of clients now on the roll."""
    ids = arrival.ctx.ids.tolist()
    share_K = grid.shares(weight_K, ids)
    grid.check(arrival)
    roll.add(ids, share_K, seen)
    return share_K


class Fold:
    """A partial weighted sum over some clients of a round: `add` clients, `merge` folds, then take the `mean`."""

    def __init__(self, model: Tree, total_weight: float, plain: int = 0):
        """`plain`: so many clients may come whose unweighted mean is wanted too."""
        self.grid = Grid(model, total_weight)
        self.roll = Roll()
        self.sum: Tree = {}
        self.cover: dict[str, Cover] = {}
        self.plain = Fold(model, plain) if plain else None

    def add(self, arrival: Arrival, weight_K: Tensor, seen: dict[str, Tensor]) -> None:
        """Fold in K clients."""
        share_K = admitted(arrival, weight_K, seen, self.grid, self.roll)
        there_K = share_K.to(self.grid.device, non_blocking=True)
        if self.plain:
            self.plain.add(arrival, torch.ones_like(weight_K), {})
        for name, update in arrival.update.items():
            if name not in self.sum:
                self.sum[name] = torch.zeros(1, *update.shape[1:], dtype=torch.float64, device=update.device)
                self.cover[name] = Cover()
            accumulate(self.sum[name], *terms(update, there_K), self.grid.limit[name])
            scope = arrival.scope.get(name)
            self.cover[name].add(None if scope is None else scope.expand(-1, *update.shape[1:]), share_K)

    def merge(self, other: "Fold") -> "Fold":
        """Take in another partial sum of the same round; overlap is refused."""
        self.roll.merge(other.roll)
        if self.plain and other.plain:
            self.plain.merge(other.plain)
        for name, x in other.sum.items():
            self.sum[name] = self.sum[name].add_(x) if name in self.sum else x
            self.cover[name] = self.cover[name].merge(other.cover[name]) if name in self.cover else other.cover[name]
        return self

    def mean(self) -> Blended:
        """Sums divided by the weight that voted, per coordinate; zero where nobody did. Uses the fold up."""
        order = self.roll.in_order(self.grid.device)
        covered: dict[str, Tensor | None] = {}
        for name, x in self.sum.items():
            votes, covered[name] = self.cover[name].votes(x)
            x.div_(votes if covered[name] is None else votes.masked_fill(votes == 0, 1.0))
        apart = frozenset(name for name, cover in self.cover.items() if cover.dense is not None)
        return Blended(self.sum, covered, *order, self.plain.mean().update if self.plain else None, apart)


class Collect:
    """For blends that need everyone at once (median, Krum): keeps the arrivals until the end, then in id order."""

    def __init__(self, model: Tree, total_weight: float, reduce: Callable):
        self.grid = Grid(model, total_weight)
        self.roll = Roll()
        self.reduce = reduce
        self.update: dict[int, Tree] = {}
        self.scope: dict[int, dict[str, Tensor | None]] = {}

    def add(self, arrival: Arrival, weight_K: Tensor, seen: dict[str, Tensor]) -> None:
        admitted(arrival, weight_K, seen, self.grid, self.roll)
        for k, i in enumerate(arrival.ctx.ids.tolist()):
            self.update[i] = {name: x[min(k, x.shape[0] - 1)].clone() for name, x in arrival.update.items()}
            self.scope[i] = {
                name: None if m is None else m[min(k, m.shape[0] - 1)].clone() for name, m in arrival.scope.items()
            }

    def merge(self, other: "Collect") -> "Collect":
        self.roll.merge(other.roll)
        self.update |= other.update
        self.scope |= other.scope
        return self

    def mean(self) -> Blended:
        """What `Blend.collect` makes of everyone's updates and votes. Uses the arrivals up."""
        ids, weight, seen = self.roll.in_order(self.grid.device)
        values, votes = {}, {}
        for name in list(self.update[int(ids[0])]):
            values[name] = torch.stack([self.update[i].pop(name) for i in ids.tolist()])
            votes[name] = self.votes(name, ids.tolist(), values[name])
        update, covered = self.reduce(values, votes, weight)
        return Blended(update, covered, ids, weight, seen)

    def votes(self, name: str, ids: list[int], like: Tensor) -> Tensor:
        scopes, full = [self.scope[i].get(name) for i in ids], torch.ones((), dtype=torch.bool, device=like.device)
        if all(scope is None for scope in scopes):
            return full.expand_as(like)
        return torch.stack([(full if scope is None else scope).expand_as(like[0]) for scope in scopes])


def terms(update: Tensor, share_K: Tensor) -> tuple[Tensor, Tensor]:
    """What is added up, with which share: every client's update, or all of them in one where that is a product."""
    if isinstance(update, Product) and update.whole is None:
        return update.weighted(share_K), torch.ones_like(share_K[:1])
    return update, share_K


def accumulate(total: Tensor, update: Tensor, share_K: Tensor, limit: float) -> None:
    """total += sum_k round(share_k * update_k), block by block so that a block stays in cache.

    Adding and subtracting 3 * limit leaves a float64 of at most `limit` rounded to multiples of limit * 2^-51. A share
    times a float32 is exact, so it makes no difference whether the device fuses the product with the addition.
    """
    flat, update = total.view(-1), update.reshape(update.shape[0], -1).expand(len(share_K), -1)
    if total.is_cuda or update.numel() <= FEW:
        return accumulate_together(flat, update, share_K, 3 * limit)
    magic, shares = total.new_tensor(3 * limit), share_K.tolist()
    term = torch.empty(min(BLOCK, flat.numel()), dtype=torch.float64, device=total.device)
    for start in range(0, flat.numel(), BLOCK):
        into = flat[start : start + BLOCK]
        block = term[: into.numel()]
        for k, share in enumerate(shares):
            block.copy_(update[k, start : start + BLOCK])
            if update.dtype == torch.float32:
                torch.add(magic, block, alpha=share, out=block)
            else:
                block.mul_(share).add_(magic)
            into.add_(block.sub_(magic))
    return None


def accumulate_together(total: Tensor, update: Tensor, share_K: Tensor, magic: float) -> None:
    """The same sum in few operations: all rows of a block at once, since exact terms may be added in any order."""
    width = max(1, (1 << 26) // max(len(share_K), 1))
    for start in range(0, len(total), width):
        terms = torch.mul(update[:, start : start + width], share_K[:, None])  # float64
        total[start : start + width] += terms.add_(magic).sub_(magic).sum(0)
