"""The k largest of every stretch of every row, found by digits: histograms of eight bits, from the highest down.

What is compared is a whole number: the bits of a float32's magnitude, or a hash of the position. Every pass keeps the
digit at which the count from above reaches k. It is the last that matters where all that share it are taken.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.cuda.draws import word
from sparing.accel.cuda.stretches import stretch_blocks
from sparing.core.keys import GOLDEN

BLOCK, TILE = 1 << 16, 1 << 11
"""Numbers that a program looks at, and of these at once."""
PASSES = 4
"""Digits that are looked for: all of a float32; words that share so many are few, and compared one by one."""
FEW = 8
"""A digit that so small a part of a tile shares is counted one by one: a histogram takes the same time for any."""


@triton.jit
def compared_numbers(x, keys, row, i, width, inside, GOLDEN: tl.constexpr, WORDS: tl.constexpr):
    """What is compared: uint64 of which the smallest words are largest, or uint32 of magnitudes, NaN above all."""
    if WORDS:
        found = word(tl.load(keys + row), i, GOLDEN) ^ 0x7FFFFFFFFFFFFFFF
    else:
        found = tl.load((x + row * width) + i, mask=inside, other=0.0).to(tl.uint32, bitcast=True) << 1
        found = tl.where(found > 0xFF000000, 0xFFFFFFFE, found).to(tl.uint32)
    return found


@triton.jit
def sharing(found, shift):
    """The digits found so far, of every number; no shift is as long as a number."""
    return (found >> (shift // 2).to(found.dtype)) >> (shift - shift // 2).to(found.dtype)


@triton.jit
def undecided(prefix, shift, want, left, WORDS: tl.constexpr):
    """Some that share the prefix are wanted and others not; or it is not yet known whether the last one is a NaN."""
    more = (want > 0) & (want < left)
    if not WORDS:
        top = prefix >> tl.maximum(24 - shift, 0)
        more = more | ((want > 0) & (shift > 0) & (shift <= 24) & (top == 255))
    return more


@triton.jit
def settled(k, length, state, hist, cell, cells, turn, WORDS: tl.constexpr):
    """Where the search stands before a pass: the digits so far, bits still open, wanted and found with these digits."""
    left = length.to(tl.int64)
    want = tl.minimum(tl.maximum(tl.load(k + cell), 0), left)
    prefix, shift = want * 0, want * 0 + (64 if WORDS else 32)
    if turn > 0:
        at = state + ((turn - 1) * cells + cell) * 4
        prefix, shift, want, left = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        if undecided(prefix, shift, want, left, WORDS) & (shift > 0):
            bins = tl.arange(0, 256)
            count = tl.load(hist + ((turn - 1) * cells + cell) * 256 + bins).to(tl.int64)
            above = tl.sum(count, 0) - tl.cumsum(count, 0)
            here = (above < want) & (want <= above + count)
            prefix = (prefix << 8) | tl.sum(tl.where(here, bins, 0), 0).to(tl.int64)
            shift = shift - 8
            want, left = want - tl.sum(tl.where(here, above, 0), 0), tl.sum(tl.where(here, count, 0), 0)
    return prefix, shift, want, left


@triton.jit(do_not_specialize=["turn"])
def digits_kernel(
    x, keys, k, stretch, start, stop, first, state, hist, ties, width, cells, S, B, turn,
    LAST: tl.constexpr, FEW: tl.constexpr, GOLDEN: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Counts the next digit of all that share those before; after the last one, how many are equal in each block."""
    b, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s, begin, end = tl.load(stretch + b), tl.load(start + b), tl.load(stop + b)
    opening = tl.load(first + s)
    cell = row * S + s
    length = end - tl.load(start + opening)
    prefix, shift, want, left = settled(k, length, state, hist, cell, cells, turn, WORDS)
    if b == opening:
        at = state + (turn * cells + cell) * 4
        tl.store(at, prefix)
        tl.store(at + 1, shift)
        tl.store(at + 2, want)
        tl.store(at + 3, left)
    if undecided(prefix, shift, want, left, WORDS):
        hist += (turn * cells + cell) * 256
        equal = b * 0
        for at in range(begin, tl.minimum(begin + BLOCK, end), TILE):
            i = at + tl.arange(0, TILE)
            inside = i < end
            found = compared_numbers(x, keys, row, i, width, inside, GOLDEN, WORDS)
            mine = inside & (sharing(found, shift) == prefix.to(found.dtype))
            many = tl.sum(mine.to(tl.int32), 0)
            equal += many
            if not LAST:
                digit = (sharing(found, shift - 8) & 255).to(tl.int32)
                if many * FEW < TILE:
                    tl.atomic_add(hist + digit, 1, mask=mine, sem="relaxed")
                else:
                    bins = tl.arange(0, 256)
                    count = tl.histogram(tl.where(mine, digit, 0), 256)
                    count -= tl.where(bins == 0, TILE - many, 0)
                    tl.atomic_add(hist + bins, count, mask=count > 0, sem="relaxed")
        if LAST:
            tl.store(ties + row * B + b, equal)


@triton.jit
def next_below(keys, row, bound, turn, begin, end, prefix, shift, GOLDEN: tl.constexpr, TILE: tl.constexpr):
    """The largest that shares these digits, in turn 0, or the largest of them below the bound."""
    best = bound * 0
    for at in range(begin, end, TILE):
        i = at + tl.arange(0, TILE)
        found = compared_numbers(keys, keys, row, i, end, i < end, GOLDEN, True)
        mine = (i < end) & (sharing(found, shift) == prefix.to(found.dtype)) & ((found < bound) | (turn == 0))
        best = tl.maximum(best, tl.max(tl.where(mine, found, 0), 0))
    return best


@triton.jit
def mark_kernel(
    x, keys, stretch, start, stop, first, state, ties, out, kept, width, S, B,
    GOLDEN: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    b, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    s, begin, end = tl.load(stretch + b), tl.load(start + b), tl.load(stop + b)
    at = state + (row * S + s) * 4
    prefix, shift, want, left = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    some = (want > 0) & (want < left)  # of those that are equal
    before, bound = b * 0, (want * 0).to(tl.uint64)
    if WORDS:
        for turn in range(tl.where(some, want, 0).to(tl.int32)):
            bound = next_below(
                keys, row, bound, turn, tl.load(start + tl.load(first + s)), end, prefix, shift, GOLDEN, TILE
            )
    elif some:
        j = tl.arange(0, MANY)
        for block in range(tl.load(first + s), b, MANY):
            before += tl.sum(tl.load(ties + row * B + block + j, mask=block + j < b, other=0), 0)
    for at in range(begin, tl.minimum(begin + BLOCK, end), TILE):
        i = at + tl.arange(0, TILE)
        inside = i < end
        found = compared_numbers(x, keys, row, i, width, inside, GOLDEN, WORDS)
        digits, least = sharing(found, shift), prefix.to(found.dtype)
        equal = inside & (digits == least)
        if WORDS:
            equal = equal & (want > 0) & (found >= bound)
        elif some:
            many = tl.sum(equal.to(tl.int32), 0)
            equal = equal & (before + tl.cumsum(equal.to(tl.int32), 0) <= want)
            before += many
        else:
            equal = equal & (want > 0)
        chosen = (digits > least) | equal
        if not WORDS:
            chosen = (chosen | ((want > 0) & (shift == 0) & (prefix == 0xFFFFFFFE))) & (found != 0)
            value = tl.load((x + row * width) + i, mask=inside, other=0.0)
            tl.store((kept + row * width) + i, tl.where(chosen, value, 0.0), mask=inside)
        tl.store((out + row * width) + i, chosen.to(tl.int8), mask=inside)


def select(x: Tensor, keys: Tensor, lengths: tuple[int, ...], k: Tensor, words: bool) -> tuple[Tensor, Tensor]:
    """Of float32 `[K, n]`, also what is left of them, or of words of keys `[K]`; k `[K, S]` int64."""
    rows, width, device = len(k), sum(lengths), k.device
    out = torch.empty(rows, width, dtype=torch.bool, device=device)
    kept = x if words else torch.empty_like(x)
    if not out.numel():
        return out, kept
    tables = stretch_blocks(lengths, BLOCK, device)
    blocks, stretches, passes = len(tables.stretch), len(lengths), PASSES
    cells = rows * stretches
    state = torch.empty(passes + 1, cells, 4, dtype=torch.int64, device=device)
    hist = torch.zeros(passes, cells, 256, dtype=torch.int32, device=device)
    ties = torch.empty(rows, blocks, dtype=torch.int32, device=device)
    k = k.contiguous()
    grid, how = (blocks, rows), {"GOLDEN": GOLDEN, "WORDS": words, "BLOCK": BLOCK, "TILE": TILE, "num_warps": 8}
    for i in range(passes + 1):
        digits_kernel[grid](
            x, keys, k, *tables, state, hist, ties, width, cells, stretches, blocks, i,
            LAST=i == passes, FEW=FEW, **how,
        )  # fmt: skip
    mark_kernel[grid](
        x, keys, *tables, state[passes], ties, out.view(torch.int8), kept, width, stretches, blocks, MANY=1024, **how
    )
    return out, kept


def largest_stretches(x: Tensor, lengths: tuple[int, ...], k: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of every stretch of float32 `[K, n]`, and x without the others: k `[K, S]` int64."""
    return select(x.contiguous(), k, lengths, k.expand(len(x), -1), words=False)


def choose_positions(keys: Tensor, d: int, k: int) -> Tensor:
    """`core.keys.choose`: the k of d positions with the smallest words, bool `[K, d]`."""
    return select(keys, keys.contiguous(), (d,), torch.full((len(keys), 1), k, device=keys.device), words=True)[0]
