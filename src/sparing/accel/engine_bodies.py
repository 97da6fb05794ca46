"""Bodies of a few operations of engines, banks and training."""

import numpy as np
import torch
from torch import Tensor

from sparing.accel.compiled.row_bodies import sums_of_differences, write_rows
from sparing.accel.cuda import takes_kernels
from sparing.accel.lazy_product import Product
from sparing.core.ops import place
from sparing.core.tree import Tree
from sparing.engines import divergence
from sparing.storage import bank
from sparing.train import call, optim


def fast_difference_sums(pairs: list[tuple[Tensor, Tensor]], k: int) -> Tensor:
    """`divergence.difference_sums` in one kernel, or in one pass."""
    found = sums_of_differences(pairs, k)
    if found is not None:
        return found
    if not all(takes_kernels(x) and x.dtype == origin.dtype == torch.float32 for x, origin in pairs):
        return divergence.difference_sums.plain(pairs, k)
    from sparing.accel.cuda.spread import spread_sums as at_once

    return at_once(pairs, k)


def fast_mix_rows(rows: Tree, index: np.ndarray, weight: Tensor) -> Tree:
    """`bank.mix_rows` in a kernel, added up in float32."""
    if not rows or not all(takes_kernels(x) and x.dtype == torch.float32 for x in rows.values()):
        return bank.mix_rows.plain(rows, index, weight)
    from sparing.accel.cuda.mixtures import mixed_rows

    device = next(iter(rows.values())).device
    there, weight = place(torch.from_numpy(index), device), place(weight.float(), device)
    return {name: mixed_rows(x, there, weight) for name, x in rows.items()}


def fast_put_rows(rows: Tensor, index: Tensor, new: Tensor) -> None:
    """`bank.put_rows`."""
    if rows.is_cuda or not write_rows(rows, index.numpy(), new):
        bank.put_rows.plain(rows, index, new)


def fast_add_product(grad: Tensor, x: Tensor, y: Tensor, strength: float) -> Tensor:
    """`optim.add_product`; of K clients on a GPU in one pass."""
    if grad.is_cuda and grad.ndim == 3:
        return torch.baddbmm(grad, x, y, alpha=strength)
    return optim.add_product.plain(grad, x, y, strength)


def fast_seems_finite(x: Tensor) -> bool:
    """`call.seems_finite`, of a product without forming it."""
    if isinstance(x, Product) and bool(x.at_most() <= torch.finfo(x.dtype).max):
        return True
    return call.seems_finite.plain(x)
