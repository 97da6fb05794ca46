"""Server optimisers: transforms of the averaged update. They touch only coordinates covered this round."""

from collections.abc import Callable

import torch
from torch import Tensor

from sparing.core.context import Ctx
from sparing.core.errors import check_range
from sparing.core.method import Blended, Report, Step
from sparing.core.tree import Layout, Tree, prefixed, under

Square = Callable[[Tensor, Tensor, float], Tensor]
SQUARES: dict[str, Square] = {
    "fedadagrad": lambda v, dd, beta: v + dd,
    "fedadam": lambda v, dd, beta: beta * v + (1 - beta) * dd,
    "fedyogi": lambda v, dd, beta: v - (1 - beta) * dd * torch.sign(v - dd),
}
"""The next second moment from the last one and the squared update."""


def server_momentum_step(layout: Layout, beta: float = 0.9, lr: float = 1.0) -> Step:
    """FedAvgM: v <- beta v + x, the model moves by lr v. Buffers move by x itself."""
    check_range("fedavgm.beta", beta, 0, 1)
    check_range("fedavgm.lr", lr, 0, float("inf"), open_low=True)
    params = frozenset(layout.params)

    def init(model: Tree, clients: int) -> Tree:
        return {name: torch.zeros_like(model[name], dtype=torch.float64) for name in layout.params}

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        update, state = dict(blended.update), dict(state)
        for name in params & update.keys():
            moved = beta * state[name] + update[name]
            state[name] = _where_covered(blended.covered[name], moved, state[name])
            update[name] = _where_covered(blended.covered[name], lr * moved, torch.zeros_like(moved))
        return update, state, {}

    return Step(apply, init, name="fedavgm")


def adaptive_server_step(layout: Layout, kind: str, lr: float, beta1: float, beta2: float, tau: float) -> Step:
    """FedOpt: m <- beta1 m + (1 - beta1) x, v by `kind`, the model moves by lr m / (sqrt(v) + tau).

    m starts at 0 and v at tau^2, without bias correction, as in the paper. Buffers move by x itself.
    """
    check_range(f"{kind}.lr", lr, 0, float("inf"), open_low=True)
    check_range(f"{kind}.tau", tau, 0, float("inf"), open_low=True)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        check_range(f"{kind}.{name}", beta, 0, 1)
    params, square = frozenset(layout.params), SQUARES[kind]

    def init(model: Tree, clients: int) -> Tree:
        zeros = {name: torch.zeros_like(model[name], dtype=torch.float64) for name in layout.params}
        return prefixed("mean", zeros) | prefixed("square", {name: x + tau**2 for name, x in zeros.items()})

    def apply(state: Tree, blended: Blended, ctx: Ctx) -> tuple[Tree, Tree, Report]:
        update, mean, squares = dict(blended.update), under("mean", state), under("square", state)
        for name in params & update.keys():
            x, seen = update[name], blended.covered[name]
            m = beta1 * mean[name] + (1 - beta1) * x
            v = square(squares[name], x * x, beta2)
            mean[name], squares[name] = _where_covered(seen, m, mean[name]), _where_covered(seen, v, squares[name])
            update[name] = _where_covered(seen, lr * m / (v.sqrt() + tau), torch.zeros_like(m))
        return update, prefixed("mean", mean) | prefixed("square", squares), {}

    return Step(apply, init, name=kind)


def _where_covered(mask: Tensor | None, yes: Tensor, no: Tensor) -> Tensor:
    return yes if mask is None else torch.where(mask, yes, no)
