"""Bodies of a few operations of engines, banks and training."""

import numpy as np
import torch
from torch import Tensor

from sparing.accel.cuda import ready
from sparing.accel.lazy_product import Product
from sparing.core.ops import place
from sparing.core.tree import Tree
from sparing.engines import stale
from sparing.run import bank
from sparing.train import lesson, optim


def spreads(pairs: list[tuple[Tensor, Tensor]], k: int) -> Tensor:
    """`stale.spreads` in one kernel."""
    if not all(ready(x) and x.dtype == origin.dtype == torch.float32 for x, origin in pairs):
        return stale.spreads.plain(pairs, k)
    from sparing.accel.cuda.spread import spreads as at_once

    return at_once(pairs, k)


def mix_rows(rows: Tree, index: np.ndarray, weight: Tensor) -> Tree:
    """`bank.mix_rows` in a kernel, added up in float32."""
    if not rows or not all(ready(x) and x.dtype == torch.float32 for x in rows.values()):
        return bank.mix_rows.plain(rows, index, weight)
    from sparing.accel.cuda.mixtures import mixed

    device = next(iter(rows.values())).device
    there, weight = place(torch.from_numpy(index), device), place(weight.float(), device)
    return {name: mixed(x, there, weight) for name, x in rows.items()}


def add_product(grad: Tensor, x: Tensor, y: Tensor, strength: float) -> Tensor:
    """`optim.add_product`; of K clients on a GPU in one pass."""
    if grad.is_cuda and grad.ndim == 3:
        return torch.baddbmm(grad, x, y, alpha=strength)
    return optim.add_product.plain(grad, x, y, strength)


def seems_finite(x: Tensor) -> bool:
    """`lesson.seems_finite`, of a product without forming it."""
    if isinstance(x, Product) and bool(x.at_most() <= torch.finfo(x.dtype).max):
        return True
    return lesson.seems_finite.plain(x)
