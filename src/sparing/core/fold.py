"""The exact fold: a weighted mean that does not depend on order, grouping or the number of workers.

Floating-point addition is exact as long as all terms lie on one power-of-two grid and the sum stays below 2^53 grid
steps. So every term w_k * u_k is rounded once, on its own, to a grid fixed at the start of the round, and the float64
accumulator only ever adds exactly. The server needs one accumulator per tensor, and a second one only where clients
vote on different coordinates.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.grid import Grid, Limits
from sparing.core.method import Arrival, Blended, Collector, Gathering, Report
from sparing.core.operation import operation
from sparing.core.roster import Roster
from sparing.core.tree import Masks, Models, Tree, column, flat, take_rows
from sparing.core.votes import Votes, divide_by_votes


class Arrived(Protocol):
    """What arrived in a round, ready to be blended."""

    roster: Roster

    def mean(self, ctx: Ctx) -> Blended: ...


class Fold:
    """A partial weighted sum over some clients of a round: `add` clients, `merge` folds, then take the `mean`."""

    def __init__(self, limits: Limits, total_weight: float, uniform: int = 0):
        """`uniform`: so many clients may come whose unweighted mean is wanted too; 0: it is not."""
        self.grid = Grid(limits, total_weight)
        self.roster = Roster()
        self.sums: Tree = {}
        self.votes: dict[str, Votes] = {}
        self.uniform = Fold(limits, uniform) if uniform else None

    def add(self, arrival: Arrival, weight_K: Tensor, seen: dict[str, Tensor]) -> None:
        """Fold in K clients."""
        ctx = arrival.ctx
        share_K = self.grid.shares(weight_K, ctx)
        self.roster.refuse_twice(ctx.ids.tolist())
        if self.uniform:
            self.uniform.add(arrival, torch.ones_like(weight_K), {})
        self.sums = add_to_sums(self.sums, arrival.update, share_K, self.grid, ctx)
        self.roster.add(ctx, share_K, seen)
        self._count_votes(arrival.update, arrival.scope, share_K, share_K.sum())

    def add_sum(self, sums: Tree, scope: Masks, share_K: Tensor, total: Tensor, seen: Tree, ctx: Ctx) -> None:
        """Fold in K clients of whom only the sum of their terms is known, and that of their shares, `total`."""
        self.roster.refuse_twice(ctx.ids.tolist())
        self.sums = {name: self.sums[name] + x if name in self.sums else x for name, x in sums.items()}
        self.roster.add(ctx, share_K, seen)
        self._count_votes(sums, scope, share_K, total)

    def _count_votes(self, update: Tree, scope: Masks, share_K: Tensor, total: Tensor) -> None:
        for name, x in update.items():
            mask = scope.get(name)
            mask = None if mask is None else mask.expand(-1, *x.shape[1:])
            self.votes.setdefault(name, Votes()).add(mask, share_K, total)

    def merge(self, other: "Fold") -> "Fold":
        """Take in another partial sum of the same round; overlap is refused."""
        self.roster.merge(other.roster)
        if self.uniform and other.uniform:
            self.uniform.merge(other.uniform)
        for name, x in other.sums.items():
            self.sums[name] = self.sums[name].add_(x) if name in self.sums else x
            self.votes[name] = self.votes[name].merge(other.votes[name]) if name in self.votes else other.votes[name]
        return self

    def mean(self, ctx: Ctx) -> Blended:
        """Sums divided by the weight that voted, per coordinate; zero where nobody did. Uses the fold up."""
        ids, weight, seen = self.roster.in_order(ctx)
        apart = frozenset(name for name, votes in self.votes.items() if votes.dense is not None)
        update, covered = divide_by_votes(self.sums, self.votes)
        uniform = self.uniform.mean(ctx).update if self.uniform else None
        return Blended(update, covered, ids, weight, seen, uniform, apart)


@operation
def add_to_sums(sums: Tree, update: Tree, share_K: Tensor, grid: Grid, ctx: Ctx) -> Tree:
    """sums + sum_k round(share_k * update_k), all updates being within the grid."""
    grid.require_within(update, ctx)
    out = dict(sums)
    for name, x in update.items():
        total = terms_on_grid(x, share_K, grid.limit(name)).sum(0, keepdim=True)
        out[name] = sums[name] + total if name in sums else total
    return out


def terms_on_grid(x: Tensor, share_K: Tensor, limit: Tensor) -> Tensor:
    """What K updates of one tensor add to its sum: `[K, *shape]` float64, multiples of limit * `GRID_STEP`.

    Adding and subtracting 3 * limit leaves a float64 of at most `limit` rounded to such multiples. A share times a
    float32 is exact, so it makes no difference whether a device fuses the product with the addition.
    """
    magic = 3 * limit
    return (x.expand(len(share_K), *x.shape[1:]) * column(share_K.to(x.device), x)).add_(magic).sub_(magic)


class Collect:
    """For blends that need everyone at once (median, Krum): keeps the arrivals until the end, then in id order."""

    def __init__(
        self, limits: Limits, total_weight: float, reduce: Collector, gathering: Gathering | None = None,
        model: Tree | None = None,
    ):  # fmt: skip
        """`gathering`: what clients have of these tensors is blended by it, and compared with `model`."""
        self.grid = Grid(limits, total_weight)
        self.roster = Roster()
        self.reduce, self.gathering, self.model = reduce, gathering, model or {}
        self.update: dict[int, Tree] = {}
        self.scope: dict[int, dict[str, Tensor | None]] = {}

    def add(self, arrival: Arrival, weight_K: Tensor, seen: dict[str, Tensor]) -> None:
        share_K = self.grid.shares(weight_K, arrival.ctx)
        self.grid.require_within(arrival.update, arrival.ctx)
        self.roster.refuse_twice(arrival.ctx.ids.tolist())
        self.roster.add(arrival.ctx, share_K, seen)
        for k, i in enumerate(arrival.ctx.ids.tolist()):
            self.update[i] = {name: x[min(k, x.shape[0] - 1)].clone() for name, x in arrival.update.items()}
            self.scope[i] = {
                name: None if m is None else m[min(k, m.shape[0] - 1)].clone() for name, m in arrival.scope.items()
            }

    def merge(self, other: "Collect") -> "Collect":
        self.roster.merge(other.roster)
        self.update |= other.update
        self.scope |= other.scope
        return self

    def mean(self, ctx: Ctx) -> Blended:
        """What `Blend.collect` makes of everyone's updates and votes. Uses the arrivals up."""
        ids, weight, seen = self.roster.in_order(ctx)
        values, votes = {}, {}
        for name in [name for name in self.update[int(ids[0])] if name not in self.gathered_names]:
            values[name] = torch.stack([self.update[i].pop(name) for i in ids.tolist()])
            votes[name] = self.votes(name, ids.tolist(), values[name])
        weight = ctx.placed(weight)
        update, covered = self.reduce(values, votes, weight)
        refuse_misfits({name: x.shape[1:] for name, x in values.items()}, update, covered)
        came = [{name: self.update[i].pop(name) for name in sorted(self.gathered_names)} for i in ids.tolist()]
        gathered, report = self.gathered(came, weight, ctx)
        masks = {**covered, **dict.fromkeys(gathered)}
        return Blended({**update, **gathered}, masks, ids, weight, seen, report=report)

    @property
    def gathered_names(self) -> frozenset[str]:
        return self.gathering.names if self.gathering else frozenset()

    def gathered(self, came: list[Tree], weight: Tensor, ctx: Ctx) -> tuple[Tree, Report]:
        """What the gathering makes of everyone's values, as differences from the model, and its report."""
        if self.gathering is None:
            return {}, {}
        values, report = self.gathering.blend(self.model, came, weight, ctx)
        return {n: x - self.model[n].double() if n in self.model else x for n, x in values.items()}, report

    def votes(self, name: str, ids: list[int], like: Tensor) -> Tensor:
        scopes, full = [self.scope[i].get(name) for i in ids], torch.ones((), dtype=torch.bool, device=like.device)
        if all(scope is None for scope in scopes):
            return full.expand_as(like)
        return torch.stack([(full if scope is None else scope).expand_as(like[0]) for scope in scopes])


def mean_of_voters(values: Models, votes: Models, weight: Tensor) -> tuple[Tree, Tree]:
    """The weighted mean over the voters of every coordinate, added up in id order."""
    update, covered = {}, {}
    for name, x in values.items():
        above = torch.zeros(1, *x.shape[1:], dtype=torch.float64, device=x.device)
        below = torch.zeros_like(above)
        for k in weight.nonzero()[:, 0].tolist():
            above += torch.where(votes[name][k], x[k].double() * weight[k], 0.0)
            below += votes[name][k] * weight[k]
        covered[name] = below > 0
        update[name] = above / torch.where(covered[name], below, 1.0)
    return update, covered


def refuse_misfits(shapes: Mapping[str, tuple[int, ...]], update: Tree, covered: Tree) -> None:
    """Refuse what a `collect` gives where it does not fit tensors of these shapes, which it was given."""
    for name, own in shapes.items():
        shape = (1, *own)
        for what, given, dtype in (("update", update, torch.float64), ("covered", covered, torch.bool)):
            found = given.get(name)
            if found is None or found.shape != shape or found.dtype != dtype:
                seen = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise MethodError(
                    f"of {name!r} the blend's `collect` gives {seen} as {what}; let it give {dtype} {list(shape)}"
                )


def without_unsound(arrival: Arrival, fold: "Fold | Collect") -> Arrival:
    """Without the clients that sent something not finite or beyond the grid; they are counted."""
    fine_K = torch.ones(len(arrival.ctx.ids), dtype=torch.bool, device=arrival.ctx.device)
    for name, x in arrival.update.items():
        if x.numel():
            low, high = torch.aminmax(flat(x), dim=1)
            fine_K &= (low >= -fold.grid.limit(name)) & (high <= fold.grid.limit(name))
    for x in arrival.notes.values():
        fine_K &= flat(x).isfinite().all(dim=1)
    if bool(fine_K.all()):
        return arrival
    fold.roster.refused += int((~fine_K).sum())
    index = fine_K.nonzero()[:, 0]
    scope = {name: m if m is None or m.shape[0] == 1 else m[index] for name, m in arrival.scope.items()}
    update, notes = take_rows(arrival.update, index), take_rows(arrival.notes, index)
    return Arrival(update, scope, notes, arrival.model, arrival.ctx.at(index))
