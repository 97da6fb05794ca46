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
from functools import cache

import torch
from torch import Tensor

from sparing.core.cover import Cover
from sparing.core.gpu import ready
from sparing.core.keys import Ctx
from sparing.core.later import Doubts, Judge, doubt
from sparing.core.product import Product
from sparing.core.protocols import Arrival, Blended
from sparing.core.reach import Grid, beyond
from sparing.core.roll import Roll
from sparing.core.tree import Tree, abreast

BLOCK = 1 << 16
FEW = 1 << 15  # values of all clients up to which the number of operations is what costs


def admitted(
    arrival: Arrival, weight_K: Tensor, seen: dict[str, Tensor], grid: Grid, roll: Roll, looked: bool = False
) -> Tensor:
    """Everything checked before anything is added (`looked`: updates are, on the way): the shares `[K]` of clients now
    on the roll."""
    share_K = grid.shares(weight_K, arrival.ctx)
    if not looked:
        grid.check(arrival)
    roll.add(arrival.ctx, share_K, seen)
    return share_K


class Fold:
    """A partial weighted sum over some clients of a round: `add` clients, `merge` folds, then take the `mean`."""

    def __init__(self, model: Tree, total_weight: float, plain: int = 0, sizes: Tensor | None = None):
        """`plain`: so many clients may come whose unweighted mean is wanted too; `sizes`: `bounds` of the model."""
        self.grid = Grid(model, total_weight, sizes)
        self.roll = Roll()
        self.sum: Tree = {}
        self.cover: dict[str, Cover] = {}
        self.plain = Fold(model, plain, sizes=sizes) if plain else None

    def add(self, arrival: Arrival, weight_K: Tensor, seen: dict[str, Tensor], positive: bool = False) -> None:
        """Fold in K clients; `positive`: none of them has weight zero."""
        together = ready(weight_K) and all(x.dtype == torch.float32 for x in arrival.update.values())
        share_K = admitted(arrival, weight_K, seen, self.grid, self.roll, looked=together)
        if self.plain:
            self.plain.add(arrival, torch.ones_like(weight_K), {}, positive=True)
        if together:
            if self.sum:
                self.make_room(arrival.update)
            sum_together(self.sum, arrival.update, share_K, self.grid, arrival.ctx)
        else:
            for name, update in arrival.update.items():
                self.sum[name] = added(self.sum.get(name), *terms(update, share_K), self.grid.limit[name])
        total = share_K.sum()
        for name, update in arrival.update.items():
            scope, cover = arrival.scope.get(name), self.cover.setdefault(name, Cover())
            cover.add(None if scope is None else scope.expand(-1, *update.shape[1:]), share_K, total, positive)

    def make_room(self, update: Tree) -> None:
        new = {name: x for name, x in update.items() if name not in self.sum}
        if not new:
            return
        sizes = [math.prod(x.shape[1:]) for x in new.values()]
        empty = torch.zeros(sum(sizes), dtype=torch.float64, device=self.grid.device)
        for (name, x), part in zip(new.items(), empty.split(sizes), strict=True):
            self.sum[name] = part.view(1, *x.shape[1:])

    def merge(self, other: "Fold") -> "Fold":
        """Take in another partial sum of the same round; overlap is refused."""
        self.roll.merge(other.roll)
        if self.plain and other.plain:
            self.plain.merge(other.plain)
        for name, x in other.sum.items():
            self.sum[name] = self.sum[name].add_(x) if name in self.sum else x
            self.cover[name] = self.cover[name].merge(other.cover[name]) if name in self.cover else other.cover[name]
        return self

    def mean(self, doubts: Doubts | None = None) -> Blended:
        """Sums divided by the weight that voted, per coordinate; zero where nobody did. Uses the fold up."""
        order = self.roll.in_order(self.grid.device, doubts)
        votes = {name: self.cover[name].votes(x) for name, x in self.sum.items()}
        covered = {name: mask for name, (_, mask) in votes.items()}
        weights = [weight for weight, _ in votes.values()]
        if weights and all(weight is weights[0] and weight.ndim == 0 for weight in weights):
            torch._foreach_div_(list(self.sum.values()), weights[0])  # pyright: ignore[reportPrivateImportUsage]
        else:
            for x, weight in zip(self.sum.values(), weights, strict=True):
                x.div_(weight if weight.ndim == 0 else weight.masked_fill(weight == 0, 1.0))
        apart = frozenset(name for name, cover in self.cover.items() if cover.dense is not None)
        return Blended(self.sum, covered, *order, self.plain.mean(doubts).update if self.plain else None, apart)


class Collect:
    """For blends that need everyone at once (median, Krum): keeps the arrivals until the end, then in id order."""

    def __init__(self, model: Tree, total_weight: float, reduce: Callable):
        self.grid = Grid(model, total_weight)
        self.roll = Roll()
        self.reduce = reduce
        self.update: dict[int, Tree] = {}
        self.scope: dict[int, dict[str, Tensor | None]] = {}

    def add(self, arrival: Arrival, weight_K: Tensor, seen: dict[str, Tensor], positive: bool = False) -> None:
        admitted(arrival, weight_K, seen, self.grid, self.roll)
        for k, i in enumerate(arrival.ctx.here[0].tolist()):
            self.update[i] = {name: x[min(k, x.shape[0] - 1)].clone() for name, x in arrival.update.items()}
            self.scope[i] = {
                name: None if m is None else m[min(k, m.shape[0] - 1)].clone() for name, m in arrival.scope.items()
            }

    def merge(self, other: "Collect") -> "Collect":
        self.roll.merge(other.roll)
        self.update |= other.update
        self.scope |= other.scope
        return self

    def mean(self, doubts: Doubts | None = None) -> Blended:
        """What `Blend.collect` makes of everyone's updates and votes. Uses the arrivals up."""
        ids, weight, seen = self.roll.in_order(self.grid.device, doubts)
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


def sum_together(sums: Tree, update: Tree, share_K: Tensor, grid: Grid, ctx: Ctx) -> None:
    """The same on a GPU, all tensors at once: those of every client, and those that come as products."""
    from sparing.core.gpu.fold import folded

    known = dict(sums)
    products = {n: x for n, x in update.items() if isinstance(x, Product) and x.whole is None}
    every = {n: x for n, x in update.items() if n not in products}
    room = torch.empty(sum(math.prod(x.shape[1:]) for x in update.values()), dtype=torch.float64, device=share_K.device)

    def add(names: Tree, share: Tensor, total: Tensor) -> Tensor:
        parts = [x.reshape(x.shape[0], -1).expand(share.shape[0], -1) for x in names.values()]
        sizes = tuple(x.shape[1] for x in parts)
        before = torch.cat([sums[name].view(-1) for name in names]) if known else None
        places = tuple(grid.places[name] for name in names)
        worst = folded(before, abreast(parts), share, grid.reach, sizes, places, total)
        for (name, x), part in zip(names.items(), total.split(sizes), strict=True):
            sums[name] = part.view(1, *x.shape[1:])
        return worst

    sizes = tuple(math.prod(x.shape[1:]) for x in every.values())
    if every:
        worst = add(every, share_K, room[: sum(sizes)])
        doubt(ctx.doubts, worst, too_large(list(every), sizes, grid, ctx))
    if products:
        terms = {name: x.weighted_parts(share_K) for name, x in products.items()}
        if len({len(x) for x in terms.values()}) > 1:
            terms = {name: x.sum(0, keepdim=True) for name, x in terms.items()}
        worst = add(terms, ones(next(iter(terms.values())).shape[0], share_K.device), room[sum(sizes) :])
        found: list[Tensor] = []
        for x in products.values():
            doubt(ctx.doubts, x.each_at_most(), found.append)
        doubt(ctx.doubts, worst[0], too_large_products(list(products), found, grid, ctx))


@cache
def ones(n: int, device: torch.device) -> Tensor:
    """Shares of terms that are added up as they are; made once: on a device it would be an operation each time."""
    return torch.ones(n, dtype=torch.float64, device=device)


def too_large(names: list[str], sizes: tuple[int, ...], grid: Grid, ctx: Ctx) -> Judge:
    """Looks at what `folded` says of the largest updates."""

    def judge(worst: Tensor) -> None:
        part, size, place, k = worst[:, worst[0].argmax()].tolist() if worst.numel() else [0.0] * 4
        if not part <= 1:
            leaf = int(torch.searchsorted(torch.tensor(sizes).cumsum(0), int(place), right=True))
            raise beyond(int(ctx.here[0][int(k)]), size, names[leaf], grid.limit[names[leaf]], ctx)

    return judge


def too_large_products(names: list[str], found: list[Tensor], grid: Grid, ctx: Ctx) -> Judge:
    """Looks at how far the clients' sum reaches: that must be on the grid.

    What was found, a bound `[K]` of each name, may be too high; it only says who is far off, or that something is not
    finite.
    """

    def judge(reached: Tensor) -> None:
        bounds = torch.stack(found)
        if float(reached.max()) <= 1 and math.isfinite(float(bounds.sum())):
            return
        bad = (~bounds.isfinite()).nonzero().tolist()
        if not bad and not float(reached.max()) <= 1:
            bad = [divmod(int(bounds.argmax()), bounds.shape[1])]
        for i, k in bad:
            raise beyond(int(ctx.here[0][k]), float(bounds[i, k]), names[i], grid.limit[names[i]], ctx)

    return judge


def added(total: Tensor | None, update: Tensor, share_K: Tensor, limit: float) -> Tensor:
    """The sum with these terms; one that begins with a single term is that, rounded as `accumulate` does it."""
    if total is None and len(share_K) == 1:
        first = update.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        return first.mul_(share_K).add_(3 * limit).sub_(3 * limit)
    if total is None:
        total = update.new_zeros(1, *update.shape[1:], dtype=torch.float64)
    accumulate(total, update, share_K, limit)
    return total


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
