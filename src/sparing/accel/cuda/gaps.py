"""What the size of an index depends on, for all masks of K parcels at once: see `wire.index`.

A mask is a stretch of a row. Positions are numbered among those alive; a gap is what lies between two that are kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.cuda.stretches import stretch_blocks

BLOCK = 4096
MANY = 512


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def load_block(mask, alive, row, begin, end, width, GIVEN: tl.constexpr, BLOCK: tl.constexpr):
    """What of a block is kept, and how many are alive before each of its positions; how many in all."""
    i = begin + tl.arange(0, BLOCK)
    inside = i < end
    kept = tl.load((mask + row * width) + i, mask=inside, other=0).to(tl.int32)
    if GIVEN:
        lives = tl.load((alive + row * width) + i, mask=inside, other=0).to(tl.int32)
        kept = kept * lives
        rank = tl.cumsum(lives, 0) - lives
    else:
        lives = inside.to(tl.int32)
        rank = tl.arange(0, BLOCK)
    return kept, rank, tl.sum(lives, 0)


@triton.jit
def look_kernel(
    mask, alive, stretch, start, stop, lives, counts, lasts, width, B, GIVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of every block: how many are alive, how many kept, and the number of the last one kept."""
    b, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kept, rank, living = load_block(
        mask, alive, row, tl.load(start + b), tl.load(stop + b), width, GIVEN, BLOCK
    )  # fmt: skip
    tl.store(lives + row * B + b, living)
    tl.store(counts + row * B + b, tl.sum(kept, 0))
    tl.store(lasts + row * B + b, tl.max(tl.where(kept > 0, rank, -1), 0))


@triton.jit
def join_kernel(first, lives, counts, lasts, base, before, out, S, B, MANY: tl.constexpr):
    """Of every block: how many were alive before it, and the number of the last one kept before, both in the stretch.

    Of every stretch: how many are alive, how many kept, and the number of the last.
    """
    s, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    opening, end = tl.load(first + s), tl.load(first + s + 1)
    living = opening.to(tl.int64) * 0
    count, last = living, living - 1
    tl.store(base + row * B + opening, living)
    tl.store(before + row * B + opening, last)
    for block in range(opening, end, MANY):
        j = block + tl.arange(0, MANY)
        at = row * B + j
        some = tl.load(lives + at, mask=j < end, other=0).to(tl.int64)
        upto = living + tl.cumsum(some, 0)
        final = tl.load(lasts + at, mask=j < end, other=-1).to(tl.int64)
        latest = tl.associative_scan(tl.where(final >= 0, upto - some + final, -1), 0, larger)
        latest = tl.maximum(latest, last)
        tl.store(base + at + 1, upto, mask=j + 1 < end)
        tl.store(before + at + 1, latest, mask=j + 1 < end)
        living += tl.sum(some, 0)
        count += tl.sum(tl.load(counts + at, mask=j < end, other=0).to(tl.int64), 0)
        last = tl.maximum(last, tl.max(latest, 0))
    cell = out + (row * S + s) * 4
    tl.store(cell, living)
    tl.store(cell + 1, count)
    tl.store(cell + 2, last)


@triton.jit
def gaps_kernel(
    mask, alive, stretch, start, stop, base, before, out, width, S, B, GIVEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Adds up gap >> low, where low is not zero, as `index.low_bits` has it."""
    b, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    cell = out + (row * S + tl.load(stretch + b)) * 4
    count, last = tl.load(cell + 1), tl.load(cell + 2)
    mean = (2 * (last + 1 - count) + count) // (4 * tl.maximum(count, 1))
    low = tl.sum((mean >= (tl.full((32,), 1, tl.int64) << tl.arange(0, 32))).to(tl.int64), 0)
    if low > 0:
        begin, end = tl.load(start + b), tl.load(stop + b)
        kept, rank, _ = load_block(mask, alive, row, begin, end, width, GIVEN, BLOCK)
        i = begin + tl.arange(0, BLOCK) - 1
        inside = (i >= begin) & (i < end)
        left = tl.load((mask + row * width) + i, mask=inside, other=0).to(tl.int32)
        if GIVEN:
            left = left * tl.load((alive + row * width) + i, mask=inside, other=0).to(tl.int32)
        earlier = (tl.load(before + row * B + b) - tl.load(base + row * B + b)).to(tl.int32)
        previous = tl.associative_scan(tl.where(left > 0, rank - 1, earlier), 0, larger)
        gaps = tl.where(kept > 0, (rank - previous - 1) >> low.to(tl.int32), 0)
        tl.atomic_add(cell + 3, tl.sum(gaps, 0).to(tl.int64))


def gaps_of(mask: Tensor, alive: Tensor | None, lengths: tuple[int, ...], gaps: bool = True) -> Tensor:
    """Of bool `[R, n]` in stretches, where alive `[R, n]` or everywhere: int64 `[R, S, 4]`.

    How many are alive, how many of them kept, the number of the last one (-1: none), and the sum of gap >> low where
    low is not zero; that only where `gaps` are asked for.
    """
    tables, rows, n = stretch_blocks(lengths, BLOCK, mask.device), len(mask), sum(lengths)
    blocks, stretches, given = len(tables.stretch), len(lengths), alive is not None
    small = torch.empty(3, rows, blocks, dtype=torch.int32, device=mask.device)
    wide = torch.empty(2, rows, blocks, dtype=torch.int64, device=mask.device)
    out = torch.zeros(rows, stretches, 4, dtype=torch.int64, device=mask.device)
    if not rows:
        return out
    bits = mask.contiguous().view(torch.int8)
    lives = alive.contiguous().view(torch.int8) if alive is not None else bits
    grid, where, how = (blocks, rows), tables[:3], {"GIVEN": given, "BLOCK": BLOCK, "num_warps": 8}
    look_kernel[grid](bits, lives, *where, *small, n, blocks, **how)
    join_kernel[(stretches, rows)](tables.first, *small, *wide, out, stretches, blocks, MANY=MANY)
    if gaps:
        gaps_kernel[grid](bits, lives, *where, *wide, out, n, stretches, blocks, **how)
    return out
