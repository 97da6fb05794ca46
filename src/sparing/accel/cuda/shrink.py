"""Stein-rule shrinkage of all layers in two launches; `parts.blend.stein` has the formulas.

Products are rounded before they are added, as elsewhere: so no fused multiply-add. Numbers such as beta come in a
tensor, where they stay float64.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.cuda.places import block_of
from sparing.accel.cuda.stretches import stretch_blocks
from sparing.accel.cuda.sums import fold_halves
from sparing.core.reduce import row_blocks

BLOCK = 1024


@triton.jit
def measure_kernel(
    weight, away, sums, mass, sizes, rounds, numbers, c, noise, n, L, depth,
    LANES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    layer, lanes = tl.program_id(0), tl.arange(0, LANES)
    whole = tl.zeros((LANES,), tl.float64)
    for j in range(depth):
        i = j * LANES + lanes
        whole += tl.load(weight + i, mask=i < n, other=0.0)
    everyone = tl.sum(whole, 0)  # exact: weights lie on a grid
    squares, spread = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    for j in range(depth):
        i = j * LANES + lanes
        w = tl.load(weight + i, mask=i < n, other=0.0) / everyone
        squares += w * w
        spread += w * tl.load(away + i * L + layer, mask=i < n, other=0.0)
    w2 = tl.sum(fold_halves(tl.reshape(squares, (1, LANES)), 1, LANES, LEVELS), 0)
    q = tl.sum(fold_halves(tl.reshape(spread, (1, LANES)), 1, LANES, LEVELS), 0)
    d, size = tl.load(sums + layer), tl.load(sums + 2 * L + layer)
    p = tl.where(tl.load(mass + layer) > 0, tl.load(sizes + layer).to(tl.float64), 0.0)
    finite, nothing = tl.load(numbers), tl.load(numbers + 1)
    low, high = tl.load(numbers + 2), tl.load(numbers + 3)
    known = (p > 2) & (w2 < 1) & (tl.load(rounds) > 0)
    known = known & ((d > nothing * size) | (d != d) | (size != size))
    more = q / d - 1
    found = (finite * (w2 / (1 - w2))) * tl.where(more < 0, 0.0, more)
    kept = 1 - (p - 2) / p * found
    kept = tl.where(kept < low, low, tl.where(kept > high, high, kept))
    tl.store(c + layer, tl.where(known, kept, 1.0))
    tl.store(noise + layer, tl.where(known, found, float("nan")))


@triton.jit
def shrink_kernel(
    x, m, sums, mass, c, numbers, stretch, start, stop, first, out, plane, masses,
    PULLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Planes of out: the update, the new sums, the new target, and that with the other sign."""
    b = tl.program_id(0)
    s, i, _, _, end = block_of(stretch, start, stop, first, b, BLOCK)
    here = i < end
    beta, rest, tiny = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    value = tl.load(x + i, mask=here, other=0.0)
    if PULLED:
        aim, share = tl.load(m + i, mask=here, other=0.0), tl.load(c + s)
        tl.store(out + i, tl.where(share != 1, aim + share * (value - aim), value), mask=here)
    total = tl.load(sums + i, mask=here, other=0.0) * beta + value * rest
    many = tl.load(mass + s) * beta + rest
    target = total / tl.maximum(many, tiny)
    tl.store(out + plane + i, total, mask=here)
    tl.store(out + 2 * plane + i, target, mask=here)
    tl.store(out + 3 * plane + i, -target, mask=here)
    if b == tl.load(first + s):
        tl.store(masses + s, many)


@lru_cache(maxsize=64)
def float_constants(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).to(device)


def measured_coefficients(
    weight: Tensor, away: Tensor, sums: Tensor, mass: Tensor, sizes: Tensor, rounds: Tensor, numbers: tuple[float, ...]
) -> tuple[Tensor, Tensor]:
    """Every layer's c and noise, `[L]`, of weights `[n]`, away `[n, L]`, the three sums `[3, 1, L]` of X - m and X."""
    (n, layers), cut = away.shape, row_blocks(len(weight))
    c, noise = torch.empty(2, layers, dtype=torch.float64, device=away.device)
    measure_kernel[(layers,)](
        weight.contiguous(), away.contiguous(), sums, mass, sizes, rounds, float_constants(numbers, away.device),
        c, noise, n, layers, cut.depth, LANES=cut.lanes, LEVELS=cut.lanes.bit_length() - 1, enable_fp_fusion=False,
    )  # fmt: skip
    return c, noise


def shrunk_layers(
    x: Tensor, m: Tensor, sums: Tensor, mass: Tensor, c: Tensor | None, sizes: tuple[int, ...],
    numbers: tuple[float, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of rows of all layers, float64 `[n]`: m + c (x - m), if there is a c, the new sums, the new m and -m, `[4, n]`;
    and the new masses `[L]`."""
    tables, n = stretch_blocks(sizes, BLOCK, x.device), len(x)
    out, masses = torch.empty(4, n, dtype=torch.float64, device=x.device), torch.empty_like(mass)
    shrink_kernel[(len(tables.stretch),)](
        x, m, sums, mass, mass if c is None else c, float_constants(numbers, x.device), *tables, out, n, masses,
        PULLED=c is not None, BLOCK=BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    return out, masses
