"""FedHM's clients of several ranks in one call: factors of a lower rank stand in those of the highest, zeros around.

Training leaves these zeros as they are, since the gradient of either factor is a product with the other one. On a GPU
fewer calls outweigh work on zeros. The zeros do not travel: every client pays for its own rank.
"""

import math
from functools import partial

import torch
from torch import Tensor

from sparing.accel.lazy_product import Product
from sparing.core.context import Ctx, context
from sparing.core.download import is_whole_model
from sparing.core.method import Fit, Method, Remembered
from sparing.core.parcel import Parcel
from sparing.core.tree import Masks, Tree, cleared
from sparing.engines import parcel_sizes as plain
from sparing.engines.engine import Job
from sparing.parts.factors import factor_names, in_shape
from sparing.parts.factors import factor_product as multiplied
from sparing.parts.size.fedhm.low_rank import LowRank, cut_factors
from sparing.wire import Later, plain_sizes


class JoinedFit(Fit):
    """A fit whose clients of all factored sizes have the shapes of one."""


def fast_join_sizes(job: Job) -> Job:
    """`sizes.join_sizes`, where nothing in the method looks at the entries or shapes of what travels."""
    device = next((x.device for x in job.initial.values()), torch.device("cpu"))
    joined = join_ranks(job.method) if job.path == "stacked" and device.type == "cuda" else None
    return job if joined is None else job._replace(method=joined)


def join_ranks(method: Method) -> Method | None:
    """The method for clients of several ranks in one call; None where there is no such thing."""
    fit = method.fit
    shrink = None if fit is None else fit.resize.shrink
    if fit is None or not isinstance(shrink, partial) or shrink.func is not cut_factors or fit.resize.partition:
        return None
    looked = method.up or method.memory or method.layout.extra or method.local.wraps
    if looked or not all(_shares_whole(smaller) for smaller in method.sizes):
        return None
    plan: LowRank = shrink.args[0]
    thin = [size for size, ranks in enumerate(plan.ranks) if ranks]
    if len(thin) < 2:
        return None
    room = max(thin, key=lambda size: sum(plan.ranks[size].values()))
    table = torch.tensor([room if ranks else size for size, ranks in enumerate(plan.ranks)])
    resize = fit.resize._replace(shrink=partial(_cut_padded, plan), grow=partial(_multiply_joined, plan))
    return method._replace(fit=JoinedFit(*fit._replace(sizes=lambda ctx: table[plan.sizes(ctx)], resize=resize)))


def _shares_whole(method: Method) -> bool:
    """Whether every tensor travels whole or not at all."""
    try:
        cuts = method.share.down({}, {}, context(0, 1, 1, [0], [1], 1, 1))
    except (KeyError, IndexError):  # it looks at the model
        return False
    return all(cut.mask is None for cut in cuts.values())


def _cut_padded(plan: LowRank, state: Remembered, model: Tree, size: int, ctx: Ctx) -> Tree:
    """`cut_factors` of the highest rank, each client's zero beyond its own."""
    out, own = cut_factors(plan, state, model, size, ctx), plan.sizes(ctx).tolist()
    if len(set(own)) == 1 and own[0] == size:
        return out
    for name in plan.ranks[size]:
        a, b = factor_names(name)
        rank_K = ctx.placed(torch.tensor([plan.ranks[one][name] for one in own]))
        out[a], out[b] = pad_factors(out[a], out[b], rank_K)
    return out


def _multiply_joined(plan: LowRank, resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, Masks]:
    """`multiply_factors`; dense layers as products, of which the last bits may depend on who is in the call."""
    whole = {name: _summable(*(resized[part] for part in factor_names(name))) for name in plan.ranks[size]}
    whole = {name: in_shape(x, plan.layout.shapes[name]) for name, x in whole.items()}
    return whole, dict.fromkeys(whole)


def _summable(a_K: Tensor, b_K: Tensor) -> Tensor:
    return multiplied(a_K, b_K) if a_K.ndim == 5 else Product(a_K.mT, b_K)


def pad_factors(a: Tensor, b: Tensor, rank_K: Tensor) -> tuple[Tensor, Tensor]:
    """Factors `[1, m, r(, kh, 1)]` and `[1, r, n(, 1, kw)]` that all share, for K clients: zero beyond their ranks.

    Training leaves these zeros as they are: the gradient of either factor is a product with the other one.

    >>> pad_factors(torch.ones(1, 1, 2), torch.ones(1, 2, 1), torch.tensor([1, 2]))[0]
    tensor([[[1., 0.]],
    <BLANKLINE>
            [[1., 1.]]])
    """
    within, ones = torch.arange(b.shape[1], device=b.device) < rank_K[:, None], [1] * (b.ndim - 3)
    return cleared(a, within.view(len(within), 1, -1, *ones)), cleared(b, within.view(len(within), -1, 1, *ones))


def fast_upload_sizes(method: Method, parcel: Parcel, who: int | None, ctx: Ctx) -> Later:
    """`sizes.upload_sizes`, of each client in its own rank."""
    if _differ(method, ctx):
        return _own_sizes(method, parcel, ctx)
    return plain.upload_sizes.plain(method, parcel, who, ctx)


def fast_download_sizes(method: Method, past: Tree, parcel: Parcel, ctx: Ctx) -> Later:
    """`sizes.download_sizes`, of each client in its own rank."""
    if _differ(method, ctx) and not is_whole_model(method, past, parcel):
        return _own_sizes(method, parcel, ctx)
    return plain.download_sizes.plain(method, past, parcel, ctx)


def _differ(method: Method, ctx: Ctx) -> bool:
    return isinstance(method.fit, JoinedFit) and method.fit.size(ctx) in _joined_sizes(method)


def _joined_sizes(method: Method) -> list[int]:
    plan = _plan(method)
    return [size for size, ranks in enumerate(plan.ranks) if ranks]


def _plan(method: Method) -> LowRank:
    assert method.fit is not None
    assert isinstance(method.fit.resize.shrink, partial)
    return method.fit.resize.shrink.args[0]


def _own_sizes(method: Method, parcel: Parcel, ctx: Ctx) -> Later:
    """The zeros around a client's factors do not travel."""
    fit = method.fit
    assert fit is not None
    notes = 4 * sum(math.prod(x.shape[1:]) for x in parcel.notes.values())
    width = {name: leaf.value.element_size() for name, leaf in parcel.leaves.items()}
    present, which_K = _plan(method).sizes(ctx).unique(return_inverse=True)

    def found() -> dict[str, Tensor]:
        shapes = [fit.layouts[size].shapes for size in present.tolist()]
        values = [tuple(math.prod(some[name]) * n for name, n in width.items()) for some in shapes]
        each = [plain_sizes(one, notes, 1) for one in values]
        table = torch.tensor([[int(x) for x in one.values()] for one in each])
        return dict(zip(each[0], table[which_K].unbind(1), strict=True))

    return found
