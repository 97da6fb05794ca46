"""FedHM's factors averaged in partitions of their rank, each over the clients that hold it (raFLoRA's rule).

The ranks offered, r_1 < ... < r_H, cut the columns of A and the rows of B into partitions (r_h-1, r_h]. A client of
rank r_k has those up to r_k, as they stand after training; one with the whole weight has them all: its own singular
value decomposition cuts it, and what lies beyond the last bound of factors is one partition more. What nobody brought
stays as the server has it.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import Blended, Method, Partition, Remembered, nothing
from sparing.core.tree import Layout, Masks, Tree, cleared
from sparing.parts.factors import Shape, factor_names, factor_product, factors_of, in_shape, matrix_of
from sparing.parts.size.fedhm.svd import exact_svd


def rank_partitions(layout: Layout, layouts: Sequence[Layout]) -> Partition:
    """Of the weights that are factored in some of these layouts, one for every size."""
    ranks = [ranks_of(layout, smaller) for smaller in layouts]
    names = {name for some in ranks for name in some}
    bounds = {name: sorted({some[name] for some in ranks if name in some}) for name in sorted(names)}
    whole = any(not some for some in ranks)  # and then there is one partition more, beyond the last bound

    def cut(resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, Masks]:
        values, scope = {}, {}
        for name, ends in bounds.items():
            if name in ranks[size]:
                a, b = (resized[part] for part in factor_names(name))
                found = between(a, b, [end for end in ends if end <= ranks[size][name]], layout.shapes[name])
            else:
                found = own_parts(resized[name], ends)
            count = len(ends) + whole
            rest = [torch.zeros_like(found[0])] * (count - len(found))
            values[name] = torch.stack([*found, *rest], 1)
            held = torch.arange(count, device=values[name].device) < len(found)
            scope[name] = held.view(1, -1, *[1] * len(layout.shapes[name]))
        return values, scope

    def join(state: Remembered, model: Tree, blended: Blended) -> Blended:
        update, covered = dict(blended.update), dict(blended.covered)
        for name in bounds.keys() & update.keys():
            a, b = state[f"a/{name}"], state[f"b/{name}"]
            old = [part.double() for part in between(a, b, bounds[name], layout.shapes[name])]
            old += [model[name].double() - sum(old)] if whole else []
            update[name] = cleared(update[name] - torch.stack(old, 1), covered[name]).sum(1)
            covered[name] = None
        return blended._replace(update=update, covered=covered, apart=blended.apart - names)

    return Partition(frozenset(names), cut, join)


def ranks_of(layout: Layout, smaller: Layout) -> dict[str, int]:
    """Of the weights that this smaller layout has as factors."""
    first = {name: factor_names(name)[0] for name in layout.kinds}
    return {name: smaller.shapes[a][1] for name, a in first.items() if name not in smaller.shapes}


def between(a: Tensor, b: Tensor, ends: list[int], shape: Shape) -> list[Tensor]:
    """Products `[K, *shape]` of the columns of A and the rows of B in every partition."""
    parts = [factor_product(a[:, :, low:high], b[:, low:high]) for low, high in pairwise([0, *ends])]
    return [in_shape(part, shape) for part in parts]


def own_parts(weight_K: Tensor, ends: list[int]) -> list[Tensor]:
    """The same of whole weights, each by its own decomposition, and what lies beyond the last bound.

    Row by row, since a library's batched product depends on who is in the batch.
    """
    found, shape = [], tuple(weight_K.shape[1:])
    for some in weight_K.split(1):
        a, b = factors_of(*exact_svd(matrix_of(some), ends[-1]), shape)
        parts = between(a, b, ends, shape)
        found.append([*parts, some - sum(parts)])
    return [torch.cat(part) for part in zip(*found, strict=True)]


def refuse_lookers(method: Method) -> None:
    """Refuses whatever else looks at clients' updates: these are not whole before all have come."""
    blend = method.blend
    others = [step.name for step in blend.steps if step.watch is not nothing or step.receive is not None]
    others += [blend.weigh.name] if blend.weigh.looks else []
    if blend.collect is not None or blend.lenient or others:
        raise MethodError(
            f"fedhm.blend is 'partitioned', which averages parts of a weight apart, but "
            f"{others[0] if others else 'a robust blend'!r} looks at whole updates; set fedhm.blend to increments"
        )
