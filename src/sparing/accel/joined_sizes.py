"""Clients of several sizes in one call, where `Fit.room` says that their tensors can stand in those of one size."""

import math

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.parcel import Parcel
from sparing.core.method import Method
from sparing.core.wire import Later, plain_sizes, sizes_later


def joins(method: Method) -> bool:
    """Whether this method may go so: nothing in it looks at the entries or shapes of what travels."""
    if method.fit is None or not method.fit.room:
        return False
    looked = method.up or method.down or method.memory or method.layout.extra or method.local.second
    return method.share.whole and not looked


def own_sizes_later(method: Method, parcel: Parcel, ctx: Ctx) -> Later:
    """What the parcels of these K clients take, each in its own size: the zeros around it do not travel."""
    fit = method.fit
    if fit is None or not fit.joined(ctx):
        return sizes_later(parcel)
    notes = 4 * sum(math.prod(x.shape[1:]) for x in parcel.notes.values())
    width = {name: leaf.value.element_size() for name, leaf in parcel.leaves.items()}
    present, which_K = fit.sizes(ctx).unique(return_inverse=True)

    def found() -> dict[str, Tensor]:
        shapes = [fit.layouts[size].shapes for size in present.tolist()]
        values = [tuple(math.prod(some[name]) * n for name, n in width.items()) for some in shapes]
        each = [plain_sizes(one, notes, 1) for one in values]
        table = torch.tensor([[int(x) for x in one.values()] for one in each])
        return dict(zip(each[0], table[which_K].unbind(1), strict=True))

    return found
