"""Whole trees of the host by compiled loops, each entry read once; what the loops cannot take comes back as None."""

import math

import numpy as np
import torch
from torch import Tensor

from sparing.accel.compiled import select_loops, sum_loops, tree_loops
from sparing.accel.compiled.host_rows import bits_of, can_loop, deal_rows, mask_rows, on_host, rows_of
from sparing.core.reduce import Term
from sparing.core.tree import flat

MANY = 1 << 12
"""Numbers from which on a loop is quicker than an operation of torch."""
NONE, NO_MASK = np.zeros((1, 0), np.float32), np.zeros((1, 0), np.int8)


def cleared_rows(value: Tensor, mask: Tensor) -> Tensor | None:
    if value.numel() < MANY or not on_host(value) or not _fits(mask, value):
        return None
    k = max(len(value), len(mask))
    out = value.new_empty(k, *value.shape[1:])
    given = bits_of(value), mask_rows(mask, value), bits_of(out)
    deal_rows(lambda first, last: tree_loops.clear_rows(*given, first, last), k, out.numel())
    return out


def overlaid_rows(own: Tensor, new: Tensor, mask: Tensor) -> Tensor | None:
    if own.numel() < MANY or not on_host(own, new) or not _alike(own, new) or not _fits(mask, own):
        return None
    k = max(len(own), len(new), len(mask))
    out = own.new_empty(k, *own.shape[1:])
    given = bits_of(own), bits_of(new), mask_rows(mask, own), bits_of(out)
    deal_rows(lambda first, last: tree_loops.overlay_rows(*given, first, last), k, out.numel())
    return out


def cut_differences(x: Tensor, base: Tensor, mask: Tensor) -> Tensor | None:
    """x - base, zero where the mask is false."""
    if x.numel() < MANY or not on_host(x, base) or not _alike(x, base) or not _fits(mask, x):
        return None
    k = max(len(x), len(base), len(mask))
    out = x.new_empty(k, *x.shape[1:])
    given = rows_of(x), rows_of(base), mask_rows(mask, x), rows_of(out), bits_of(out)
    deal_rows(lambda first, last: tree_loops.subtract_rows(*given, first, last), k, out.numel())
    return out


def _alike(x: Tensor, y: Tensor) -> bool:
    """Whether they have the same shape, but for one row for all."""
    return x.shape[1:] == y.shape[1:] and (1 in (len(x), len(y)) or len(x) == len(y))


def _fits(mask: Tensor, like: Tensor) -> bool:
    """Whether it broadcasts to the tensor's shape, but for the rows, and has entries for each or few for many."""
    return (
        mask.device.type == "cpu"
        and mask.dtype == torch.bool
        and mask.ndim == like.ndim
        and all(a in (1, b) for a, b in zip(mask.shape[1:], like.shape[1:], strict=True))
        and mask.shape[0] in (1, max(len(mask), len(like)))
        and like.shape[0] in (1, max(len(mask), len(like)))
    )


def add_to_sum(total: Tensor | None, update: Tensor, share_K: Tensor, limit: float) -> tuple[Tensor, float] | None:
    """The sum with these terms, and the largest magnitude among them; sums that come in are used up."""
    if update.numel() < MANY or not on_host(update):
        return None
    if total is None:
        total = update.new_zeros(1, *update.shape[1:], dtype=torch.float64)
    if total.shape[1:] != update.shape[1:] or len(update) not in (1, len(share_K)):
        return None
    blocks = -(-total.numel() // tree_loops.BLOCK)
    largest = [0] * blocks
    given = rows_of(update), bits_of(update), share_K.contiguous().numpy(), 3 * limit, total.view(-1).numpy()

    def add(first: int, last: int) -> None:
        largest[first] = tree_loops.add_rows_to_sums(*given, first, last)

    deal_rows(add, blocks, total.numel() * len(share_K))
    return total, float(np.int32(max(largest)).view(np.float32))


def add_dense_votes(dense: Tensor, scope: Tensor, share_K: Tensor) -> bool:
    """Whether they were added."""
    if dense.numel() < MANY or not dense.is_contiguous() or scope.stride(0) == 0 or not _fits(scope, dense):
        return False
    if len(scope) not in (1, len(share_K)):
        return False
    tree_loops.add_votes_of_rows(mask_rows(scope, dense), share_K.contiguous().numpy(), dense.view(-1).numpy())
    return True


def sums_of_differences(pairs: list[tuple[Tensor, Tensor]], k: int) -> Tensor | None:
    """Sums of x - origin and of its square, `[2, n]`."""
    if not all(on_host(x, origin) and len(origin) == 1 and _alike(x, origin) for x, origin in pairs):
        return None
    if any(len(x) not in (1, k) for x, _ in pairs):
        return None
    sizes = [origin.numel() for _, origin in pairs]
    out = torch.zeros(2, sum(sizes), dtype=torch.float64)
    for (x, origin), part in zip(pairs, out.split(sizes, 1), strict=True):
        given = rows_of(x), rows_of(origin)[0], k, part.numpy()
        blocks = -(-part.shape[1] // tree_loops.BLOCK)
        deal_rows(lambda first, last, given=given: tree_loops.add_differences(*given, first, last), blocks, x.numel())
    return out


def total_of_rows(x: Tensor) -> Tensor | None:
    if not can_loop(x) or x.dtype not in SUMMED or x.numel() < SHORT * len(x):
        return None
    rows = flat(x).detach().contiguous().numpy()
    out = torch.empty(len(rows), dtype=torch.float64)
    given = rows, out.numpy()
    deal_rows(lambda first, last: sum_loops.sum_rows(*given, first, last), len(rows), x.numel())
    return out


def peaks_of_rows(x: Tensor) -> Tensor | None:
    if x.numel() < MANY or not on_host(x):
        return None
    bits, out = bits_of(x), x.new_empty(len(x))
    seen = out.numpy().view(np.int32)
    deal_rows(lambda first, last: tree_loops.largest_bits(bits, seen, first, last), len(bits), x.numel())
    return out if len(bits) == len(x) else out[:1].expand(len(x))


SUMMED = (torch.float32, torch.float64)
SHORT = 64
"""Numbers of a row up to which operations of torch on all rows together are quicker."""


def dots_of_rows(terms: list[Term], k: int) -> Tensor | None:
    """`reduce.dots` of tensors of the host."""
    for x, plus, minus, other, mask in terms:
        parts = [part for part in (x, plus, minus, other) if part is not None]
        if not all(can_loop(y) and y.dtype in SUMMED and len(y) in (1, k) for y in parts):
            return None
        if not x.numel() or any(y.shape[1:] != x.shape[1:] for y in parts) or not (mask is None or _fits(mask, x)):
            return None
    planes = 1 if terms[0].other is None else 3
    out = torch.empty(len(terms), planes, k, dtype=torch.float64)
    for into, (x, plus, minus, other, mask) in zip(out, terms, strict=True):
        added, taken, beside = (NONE if part is None else rows_of(part) for part in (plus, minus, other))
        here = NO_MASK if mask is None else mask_rows(mask, x)
        given = rows_of(x), added, taken, beside, here, into.numpy()
        size = k * math.prod(x.shape[1:])
        deal_rows(lambda first, last, given=given: sum_loops.multiply_rows(*given, first, last), k, size)
    return out.permute(1, 2, 0)


def largest_of_host_rows(x: Tensor, k: int | Tensor, keep: bool = False) -> tuple[Tensor, Tensor] | None:
    """Which entries are the largest, so many in each row, and these where they are to be kept."""
    if x.numel() < MANY or not on_host(x):
        return None
    rows = bits_of(x)
    rows = np.broadcast_to(rows, (len(x), rows.shape[1])).copy() if len(rows) < len(x) else rows
    mask, kept = x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape if keep else (len(x), 0))
    count = torch.as_tensor(k).expand(len(x)).long().contiguous().numpy()
    given, fine = (rows, count, rows_of(mask), bits_of(kept)), [True] * len(x)

    def choose(first: int, last: int) -> None:
        fine[first] = select_loops.largest_of_rows(*given, first, last)

    deal_rows(choose, len(x), x.numel())
    return (mask.view(torch.bool), kept) if all(fine) else None


def structure_sums(u: Tensor) -> tuple[Tensor, Tensor] | None:
    """Sums of |u| over every row and every column of `[K, F, C]`."""
    if not can_loop(u) or u.dtype not in SUMMED or u.ndim != 3 or max(u.shape[1:]) > sum_loops.BLOCK:
        return None
    x = u.detach().contiguous().numpy()
    filters, channels = (torch.empty(len(u), n, dtype=torch.float64) for n in u.shape[1:])
    given = x, filters.numpy(), channels.numpy()
    deal_rows(lambda first, last: sum_loops.sum_structures(*given, first, last), len(u), u.numel())
    return filters, channels


def kept_structures(value: Tensor, filters: Tensor, channels: Tensor) -> Tensor | None:
    """Values `[K, F, C, ...]`, zero outside of these filters, `[K, F, 1, ...]`, and channels, `[K, 1, C, ...]`."""
    if value.numel() < MANY or not on_host(value) or not (_fits(filters, value) and _fits(channels, value)):
        return None
    (k, f, c), ones = value.shape[:3], (1,) * (value.ndim - 3)
    if filters.shape != (k, f, 1, *ones) or channels.shape != (k, 1, c, *ones):
        return None
    out = value.new_empty(value.shape)
    x, o = (part.detach().contiguous().view(k, f, c, -1).numpy().view(np.int32) for part in (value, out))
    f_K, c_K = (part.reshape(k, -1).contiguous().numpy().view(np.int8) for part in (filters, channels))
    given = x, f_K, c_K, o
    deal_rows(lambda first, last: tree_loops.keep_crossings(*given, first, last), k, value.numel())
    return out


def write_rows(rows: Tensor, place: np.ndarray, new: Tensor) -> bool:
    """Whether `rows[place] = new` was done."""
    if not on_host(rows, new) or not rows.is_contiguous() or rows.shape[1:] != new.shape[1:]:
        return False
    if len(new) != len(place) or place.min() < 0 or place.max() >= len(rows):
        return False
    tree_loops.copy_rows_to(bits_of(new), place, bits_of(rows))
    return True
