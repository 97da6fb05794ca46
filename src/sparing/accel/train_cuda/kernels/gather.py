"""Convolutions of K clients with weights of their own, as matrix products that gather their patches themselves.

Images stand `[K, B, H, W, C]` in memory, weights `[K, out, KH, KW, C]`; no patch is ever written down.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Taps(NamedTuple):
    """What is the same for all clients of a layer."""

    height: int
    width: int
    stride: int
    pad: int
    relu: bool = False  # follows at once
    zeroed: bool = False  # ... and the layer behind it brings the gradient with the ReLU's zeros already in it
    zeroes: bool = False  # such a layer: its input comes from a ReLU, and its gradient gets the zeros


@triton.jit
def gather_kernel(
    x, w, bias, out, B, O,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, UP: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[m, o] = sum over taps and channels of x[place of m under the tap, c] * w[o, tap, c], plus bias[o].

    UP: the pixels of x lie so far apart, with nothing between them, as in the gradient of a strided convolution.
    """
    k = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    b, r = m // (OH * OW), m % (OH * OW)
    top, left = r // OW * STRIDE - PAD, r % OW * STRIDE - PAD
    inside = m < B * OH * OW
    DEPTH: tl.constexpr = KH * KW * C
    x += k * B * H * W * C
    w += k * O * DEPTH
    total = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, DEPTH, BK):
        kk = k0 + tl.arange(0, BK)
        if C % BK == 0:  # this part of the depth lies under one tap
            y, z = top + k0 // C // KW, left + k0 // C % KW
            fine = inside & (y >= 0) & (z >= 0) & (y < H * UP) & (z < W * UP)
            if UP > 1:
                fine = fine & (y % UP == 0) & (z % UP == 0)
            place = ((b * H + y // UP) * W + z // UP) * C + k0 % C
            a = tl.load(x + place[:, None] + tl.arange(0, BK)[None, :], mask=fine[:, None], other=0.0)
        else:
            y, z = top[:, None] + (kk // C // KW)[None, :], left[:, None] + (kk // C % KW)[None, :]
            fine = inside[:, None] & (kk < DEPTH)[None, :] & (y >= 0) & (z >= 0) & (y < H * UP) & (z < W * UP)
            if UP > 1:
                fine = fine & (y % UP == 0) & (z % UP == 0)
            place = ((b[:, None] * H + y // UP) * W + z // UP) * C + (kk % C)[None, :]
            a = tl.load(x + place, mask=fine, other=0.0)
        v = tl.load(w + n[:, None] * DEPTH + kk[None, :], mask=(n < O)[:, None] & (kk < DEPTH)[None, :], other=0.0)
        total = tl.dot(a, tl.trans(v), total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + k * O + n, mask=n < O, other=0.0)[None, :].to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    out += k * B * OH * OW * O
    tl.store(out + m[:, None] * O + n[None, :], total.to(out.dtype.element_ty), mask=inside[:, None] & (n < O)[None, :])


@triton.jit
def correlate_kernel(
    x, dz, dw, db, B, O, rows,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[part, o, tap, c] = sum over a part of the places m of dz[m, o] * x[place of m under the tap, c]; db of dz."""
    tiles = tl.cdiv(O, BN)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    kk = (tl.program_id(0) // tiles) * BK + tl.arange(0, BK)
    k, part = tl.program_id(1).to(tl.int64), tl.program_id(2)
    DEPTH: tl.constexpr = KH * KW * C
    tap, c = kk // C, kk % C
    x += k * B * H * W * C
    dz += k * B * OH * OW * O
    total, sums = tl.zeros((BN, BK), tl.float32), tl.zeros((BN,), tl.float32)
    end = tl.minimum((part + 1) * rows, B * OH * OW)
    for m0 in range(part * rows, end, BM):
        m = m0 + tl.arange(0, BM)
        b, r = m // (OH * OW), m % (OH * OW)
        y = (r // OW * STRIDE - PAD)[:, None] + (tap // KW)[None, :]
        z = (r % OW * STRIDE - PAD)[:, None] + (tap % KW)[None, :]
        fine = (m < end)[:, None] & (kk < DEPTH)[None, :] & (y >= 0) & (y < H) & (z >= 0) & (z < W)
        a = tl.load(x + ((b[:, None] * H + y) * W + z) * C + c[None, :], mask=fine, other=0.0)
        d = tl.load(dz + m[:, None] * O + n[None, :], mask=(m < end)[:, None] & (n < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(d), a, total, input_precision=PRECISION)
        sums += tl.sum(d.to(tl.float32), 0)
    slot = part * tl.num_programs(1) + k
    dw += slot * O * DEPTH
    tl.store(dw + n[:, None] * DEPTH + kk[None, :], total, mask=(n < O)[:, None] & (kk < DEPTH)[None, :])
    if tl.program_id(0) < tiles:
        tl.store(db + slot * O + n, sums, mask=n < O)


def tile_up_to(n: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(n)))


def depth_tile(channels: int, taps: int) -> int:
    """Whole tiles of channels under one tap, where there are enough channels for that."""
    return next((size for size in (64, 32, 16) if channels % size == 0), tile_up_to(taps * channels, 32))


def gathered_taps(
    x: Tensor, w: Tensor, bias: Tensor | None, size: tuple[int, int], taps: Taps, up: int, precision: str
) -> Tensor:
    """`x [K, B, H, W, C]`, `w [K, out, KH, KW, C]` -> `[K, B, *size, out]`."""
    (k, b, h, w_, c), o = x.shape, w.shape[1]
    out = torch.empty(k, b, *size, o, dtype=x.dtype, device=x.device)
    bm, bn, bk = (64, tile_up_to(o, 64), 32) if o > 32 else (128, tile_up_to(o, 32), 16 if c % 16 == 0 else 32)
    grid = (triton.cdiv(b * size[0] * size[1], bm), k, triton.cdiv(o, bn))
    gather_kernel[grid](
        x, w, x if bias is None else bias, out, b, o, h, w_, c, *size, taps.height, taps.width, taps.stride, taps.pad,
        UP=up, BIAS=bias is not None, RELU=taps.relu, PRECISION=precision,
        BM=bm, BN=bn, BK=min(bk, depth_tile(c, taps.height * taps.width)), num_warps=4,
        num_stages=2 if c % 16 == 0 else 1,
    )  # fmt: skip
    return out


def correlated(x: Tensor, dz: Tensor, taps: Taps, precision: str) -> tuple[Tensor, Tensor]:
    """The gradients of the weights `[K, out, KH, KW, C]` and the bias `[K, out]`; `dz [K, B, OH, OW, out]`."""
    (k, b, h, w, c), (oh, ow, o) = x.shape, dz.shape[2:]
    bm, bn, bk = 128, tile_up_to(o, 64), tile_up_to(taps.height * taps.width * c, 64)
    tiles = triton.cdiv(taps.height * taps.width * c, bk) * triton.cdiv(o, bn)
    parts = max(1, min(16, 1000 // (k * tiles)))
    rows = triton.cdiv(triton.cdiv(b * oh * ow, parts), bm) * bm
    parts = triton.cdiv(b * oh * ow, rows)
    dw = torch.empty(parts, k, o, taps.height, taps.width, c, device=x.device)
    db = torch.empty(parts, k, o, device=x.device)
    correlate_kernel[(tiles, k, parts)](
        x, dz, dw, db, b, o, rows, h, w, c, oh, ow, taps.height, taps.width, taps.stride, taps.pad,
        PRECISION=precision, BM=bm, BN=bn, BK=bk, num_warps=4, num_stages=2,
    )  # fmt: skip
    return dw.sum(0), db.sum(0)
