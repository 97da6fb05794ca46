# pyright: reportPrivateImportUsage=false
# torch._foreach_* are what torch.optim itself is written in, but carry no public name.
"""Bodies of the fold: block by block on a CPU, all tensors at once on a GPU.

Updates that come as a `Product` are added up first, in one product for all clients of a call: quicker by far, and then
the last bits do depend on who is in the call, as those of such training do.
"""

import math
from collections.abc import Callable
from functools import cache, lru_cache

import torch
from torch import Tensor

from sparing.accel.compiled.row_bodies import add_dense_votes, add_to_sum
from sparing.accel.cuda import takes_kernels
from sparing.accel.lazy_product import Product
from sparing.accel.rows import in_one_row
from sparing.core import fold, votes
from sparing.core.context import Ctx
from sparing.core.errors import UploadError
from sparing.core.grid import Grid, beyond_grid
from sparing.core.ops import place
from sparing.core.tree import Tree, flat
from sparing.core.votes import Votes

BLOCK = 1 << 16
FEW = 1 << 15  # values of all clients up to which the number of operations is what costs


def fast_add_to_sums(sums: Tree, update: Tree, share_K: Tensor, grid: Grid, ctx: Ctx) -> Tree:
    """`fold.add_to_sums`; the sums that come in are used up, but where an update is refused at once they stay."""
    first = next(iter(update.values()), None)
    if first is None:
        return sums
    if takes_kernels(first) and all(x.dtype == torch.float32 for x in update.values()):
        return _add_at_once(sums, update, place(share_K, first.device), grid, ctx)
    if first.is_cuda:
        formed = {name: x + 0 if isinstance(x, Product) else x for name, x in update.items()}
        return fold.add_to_sums.plain(sums, formed, share_K, grid, ctx)
    limits, out = dict(zip(grid.places, grid.limits.tolist(), strict=True)), dict(sums)
    rest = dict(update)
    if ctx.workspace.requirements is None:  # who is refused at once may be left out, and the fold goes on
        grid.require_within(update, ctx)
    for name, x in update.items():
        found = add_to_sum(out.get(name), x, share_K, limits[name])
        if found is not None:
            out[name], largest = found
            if largest <= limits[name]:
                del rest[name]
    grid.require_within(rest, ctx)
    for name, x in rest.items():
        terms, shares = _terms(x, share_K)
        out[name] = _added(out.get(name), terms, shares, limits[name])
    return {name: out[name] for name in (*sums, *(name for name in update if name not in sums))}


def _terms(update: Tensor, share_K: Tensor) -> tuple[Tensor, Tensor]:
    """What is added up, with which share: every client's update, or all of them in one where that is a product."""
    if isinstance(update, Product) and update.whole is None:
        return update.weighted(share_K), torch.ones_like(share_K[:1])
    return update, share_K


def _added(total: Tensor | None, update: Tensor, share_K: Tensor, limit: float) -> Tensor:
    """The sum with these terms; one that begins with a single term is that, rounded as `_accumulate` does it."""
    if total is None and len(share_K) == 1:
        first = update.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        return first.mul_(share_K).add_(3 * limit).sub_(3 * limit)
    if total is None:
        total = update.new_zeros(1, *update.shape[1:], dtype=torch.float64)
    _accumulate(total, update, share_K, limit)
    return total


def _accumulate(total: Tensor, update: Tensor, share_K: Tensor, limit: float) -> None:
    """total += sum_k round(share_k * update_k), block by block so that a block stays in cache."""
    row, update = total.view(-1), update.reshape(update.shape[0], -1).expand(len(share_K), -1)
    if update.numel() <= FEW:
        return _accumulate_few(row, update, share_K, 3 * limit)
    magic, shares = total.new_tensor(3 * limit), share_K.tolist()
    term = torch.empty(min(BLOCK, row.numel()), dtype=torch.float64, device=total.device)
    for start in range(0, row.numel(), BLOCK):
        into = row[start : start + BLOCK]
        block = term[: into.numel()]
        for k, share in enumerate(shares):
            block.copy_(update[k, start : start + BLOCK])
            if update.dtype == torch.float32:
                torch.add(magic, block, alpha=share, out=block)
            else:
                block.mul_(share).add_(magic)
            into.add_(block.sub_(magic))
    return None


def _accumulate_few(total: Tensor, update: Tensor, share_K: Tensor, magic: float) -> None:
    """The same sum in few operations, since exact terms may be added in any order."""
    terms = torch.mul(update, share_K[:, None])  # float64
    total += terms.add_(magic).sub_(magic).sum(0)


def _add_at_once(sums: Tree, update: Tree, share_K: Tensor, grid: Grid, ctx: Ctx) -> Tree:
    """On a GPU, all tensors at once: those of every client, and those that come as products."""
    from sparing.accel.cuda.fold import fold_rows

    out = dict(sums)
    products = {n: x for n, x in update.items() if isinstance(x, Product) and x.whole is None}
    every = {n: x for n, x in update.items() if n not in products}
    room = torch.empty(sum(math.prod(x.shape[1:]) for x in update.values()), dtype=torch.float64, device=share_K.device)

    def add(names: Tree, share: Tensor, total: Tensor) -> Tensor:
        parts = [x.reshape(x.shape[0], -1).expand(share.shape[0], -1) for x in names.values()]
        sizes = tuple(x.shape[1] for x in parts)
        before = _sums_before(sums, names) if sums else None
        places = tuple(grid.places[name] for name in names)
        worst = fold_rows(before, in_one_row(parts), share, grid.limits, sizes, places, total)
        for (name, x), part in zip(names.items(), total.split(sizes), strict=True):
            out[name] = part.view(1, *x.shape[1:])
        return worst

    sizes = tuple(math.prod(x.shape[1:]) for x in every.values())
    if every:
        worst = add(every, share_K, room[: sum(sizes)])
        ctx.require(worst[0] <= 1, _too_large(worst, list(every), sizes, grid, ctx))
    if products:
        terms = {name: x.weighted_parts(share_K) for name, x in products.items()}
        if len({len(x) for x in terms.values()}) > 1:
            terms = {name: x.sum(0, keepdim=True) for name, x in terms.items()}
        worst = add(terms, _ones(next(iter(terms.values())).shape[0], share_K.device), room[sum(sizes) :])
        bounds = torch.stack([x.each_at_most() for x in products.values()])
        reached = worst[0] <= 1
        ctx.require(
            torch.cat([reached, (bounds < math.inf).view(-1)]), _too_large_product(bounds, list(products), grid, ctx)
        )
    return out


def _sums_before(sums: Tree, names: Tree) -> Tensor:
    """In one row; zeros for those that nobody has added to."""
    parts = [
        sums[n].view(-1) if n in sums else _zeros_like_sums(sums, math.prod(x.shape[1:])) for n, x in names.items()
    ]
    return torch.cat(parts)


def _zeros_like_sums(sums: Tree, n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.float64, device=next(iter(sums.values())).device)


@cache
def _ones(n: int, device: torch.device) -> Tensor:
    """Shares of terms that are added up as they are; made once: on a device it would be an operation each time."""
    return torch.ones(n, dtype=torch.float64, device=device)


def _too_large(
    worst: Tensor, names: list[str], sizes: tuple[int, ...], grid: Grid, ctx: Ctx
) -> Callable[[], UploadError]:
    """Looks at what `folded` says of the largest updates."""

    def error() -> UploadError:
        _, size, at, k = worst[:, worst[0].argmax()].tolist()
        leaf = int(torch.searchsorted(torch.tensor(sizes).cumsum(0), int(at), right=True))
        return beyond_grid(int(ctx.ids[int(k)]), size, names[leaf], float(grid.limit(names[leaf])), ctx)

    return error


def _too_large_product(bounds: Tensor, names: list[str], grid: Grid, ctx: Ctx) -> Callable[[], UploadError]:
    """The clients' sum must be on the grid; bounds `[names, K]` may be too high, and only say who is far off."""

    def error() -> UploadError:
        bad = (~bounds.isfinite()).nonzero().tolist()
        i, k = bad[0] if bad else divmod(int(bounds.argmax()), bounds.shape[1])
        return beyond_grid(int(ctx.ids[k]), float(bounds[i, k]), names[i], float(grid.limit(names[i])), ctx)

    return error


@lru_cache(maxsize=64)
def _number(x: float, device: torch.device) -> Tensor:
    """On the device: dividing by a number of the host would be a product with 1 / x, which rounds otherwise."""
    return place(torch.tensor(x, dtype=torch.float64), device)


def fast_add_votes(dense: Tensor, scope: Tensor, share_K: Tensor) -> None:
    """`votes.add_votes`, on a GPU as one product."""
    if scope.is_cuda:
        dense.add_((place(share_K, dense.device) @ flat(scope).double()).reshape(dense.shape))
        return
    if add_dense_votes(dense, scope, share_K):
        return
    for k, share in enumerate(share_K.tolist()):
        dense.add_(scope[k : k + 1], alpha=share)


def fast_divide_by_votes(sums: Tree, counted: dict[str, Votes]) -> tuple[Tree, dict[str, Tensor | None]]:
    """`votes.divide_by_votes`, on a GPU without asking it whether somebody's weight is more than nothing."""
    first = next(iter(sums.values()), None)
    if first is None or not first.is_cuda:
        return votes.divide_by_votes.plain(sums, counted)
    covered: dict[str, Tensor | None] = {}
    alike: dict[float, list[str]] = {}
    placed: list[tuple[Tensor, Tensor, Tensor]] = []  # a total, what to divide by, and whether there is something
    divided: list[tuple[Tensor, Tensor]] = []
    for name, x in sums.items():
        one = counted[name]
        if one.dense is None and one.total is not None and not one.total.is_cuda and float(one.total) > 0:
            alike.setdefault(float(one.total), []).append(name)
            covered[name] = one.mask
        elif one.dense is None and one.mask is None and one.total is not None:
            known = [entry for entry in placed if entry[0] is one.total]
            if not known:
                total = place(one.total, x.device)
                known = [(one.total, total.masked_fill(total == 0, 1.0), total > 0)]
                placed += known
            divided.append((x, known[0][1]))
            covered[name] = known[0][2].expand(x.shape)
        else:
            dense = one.dense if one.dense is not None else one.spread(x)
            x.div_(dense.masked_fill(dense == 0, 1.0))
            covered[name] = (dense > 0).expand(x.shape)
    for _, divisor, _ in placed:
        torch._foreach_div_([x for x, by in divided if by is divisor], divisor)
    for weight, names in alike.items():
        torch._foreach_div_([sums[name] for name in names], _number(weight, first.device))
    return sums, {name: covered[name] for name in sums}
