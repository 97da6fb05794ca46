"""The exact weighted sum of all tensors of K clients in one launch; see `core.fold`."""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def fold_kernel(update, share, reach, leaf_of, before, total, worst, K, n, FRESH: tl.constexpr, BLOCK: tl.constexpr):
    """total[i] = before[i] + sum over k of share[k] * update[k, i], each rounded to the grid of its tensor.

    worst[:, program]: the largest update as a part of what its tensor may reach (infinite where one is no number), its
    size, its place i and its k.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    limit = tl.load(reach + tl.load(leaf_of + at, mask=inside, other=0))
    magic = 3 * limit
    sums, most, whose = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
    if not FRESH:
        sums = tl.load(before + at, mask=inside, other=0.0)
    for k in range(K):
        u = tl.load(update + k.to(tl.int64) * n + at, mask=inside, other=0.0)
        sums += (u.to(tl.float64) * tl.load(share + k) + magic) - magic
        size = tl.where(u == u, tl.abs(u), float("inf"))
        whose = tl.where(size > most, k, whose)
        most = tl.maximum(most, size)
    tl.store(total + at, sums, mask=inside)
    part, where = tl.max(most.to(tl.float64) / limit, 0, return_indices=True)
    here = tl.arange(0, BLOCK) == where
    worst += tl.program_id(0)
    blocks = tl.num_programs(0)
    tl.store(worst, part)
    tl.store(worst + blocks, tl.max(tl.where(here, most, 0.0), 0).to(tl.float64))
    tl.store(worst + 2 * blocks, tl.max(tl.where(here, at, 0), 0).to(tl.float64))
    tl.store(worst + 3 * blocks, tl.max(tl.where(here, whose, 0), 0).to(tl.float64))


@triton.jit
def thirds_kernel(left, weight, out, R, O, BLOCK: tl.constexpr):
    row, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = o < O
    w = tl.load(weight + row // R).to(tl.float32)
    rest = tl.load(left + row * O + o, mask=inside, other=0.0).to(tl.float32) * w
    for part in tl.static_range(3):
        third = rest.to(tl.bfloat16)
        tl.store(out + row * 3 * O + part * O + o, third, mask=inside)
        rest -= third.to(tl.float32)


def left_in_thirds(left: Tensor, weight_K: Tensor) -> Tensor:
    """See `accel.lazy_product._in_thirds`."""
    k, r, o = left.shape
    out, block = (
        torch.empty(k * r, 3 * o, dtype=torch.bfloat16, device=left.device),
        min(1024, triton.next_power_of_2(o)),
    )
    thirds_kernel[(k * r, triton.cdiv(o, block))](left.contiguous(), weight_K, out, r, o, BLOCK=block)
    return out


@lru_cache(maxsize=4)
def leaf_places(sizes: tuple[int, ...], places: tuple[int, ...], device: torch.device) -> Tensor:
    """For every number of a row that joins tensors of these sizes, the place of its tensor."""
    return torch.tensor(places, dtype=torch.int32).repeat_interleave(torch.tensor(sizes)).to(device)


def fold_rows(
    before: Tensor | None,
    update: Tensor,
    share_K: Tensor,
    reach: Tensor,
    sizes: tuple[int, ...],
    places: tuple[int, ...],
    total: Tensor,
) -> Tensor:
    """total = `before [n] + share_K @ update [K, n]` on the grids, float64; `places`: where in `reach` each tensor's
    grid is.

    Says of the largest updates, `[4, some]`, how far they reach, how large they are, where they stand and whose they
    are.
    """
    (k, n), blocks = update.shape, triton.cdiv(update.shape[1], BLOCK)
    worst = torch.empty(4, blocks, dtype=torch.float64, device=update.device)
    leaves = leaf_places(sizes, places, update.device)
    fresh = before is None
    fold_kernel[(blocks,)](
        update, share_K, reach, leaves, total if fresh else before, total, worst, k, n, FRESH=fresh, BLOCK=BLOCK
    )
    return worst
