"""The same products as in `gather` where a tile of images is copied by the GPU itself (Hopper and later).

Under one tap a tile of outputs reads a tile of inputs of the same shape, shifted; what lies beyond the images comes as
zeros, and what lies beyond the outputs is not stored. So no address is computed for a pixel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparing.accel.train_cuda.kernels.gather import Taps

DEPTH = 32
"""Channels at once."""


@triton.jit
def slide_kernel(
    x, w, out, gate, bias, images, N, deep: tl.constexpr, across: tl.constexpr, taps: tl.constexpr,
    KW: tl.constexpr, PAD: tl.constexpr, TURNED: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
    GATE: tl.constexpr, PRECISION: tl.constexpr,
    TI: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out[m, n] = sum over taps and channels of x[place of m under the tap, c] * w[n, tap, c], plus bias[n].

    TURNED: the weights are w[c, last tap - tap, n], as in the gradient of the images. GATE: zero where gate is.
    """
    k, b = tl.program_id(1) // images, tl.program_id(1) % images * TI
    y, z = tl.program_id(0) // across * TH, tl.program_id(0) % across * TW
    n0 = tl.program_id(2) * BN
    total = tl.zeros((TI * TH * TW, BN), tl.float32)
    for i in range(taps * (deep // BC)):
        tap, c = i // (deep // BC), i % (deep // BC) * BC
        a = x.load([k, b, y + tap // KW - PAD, z + tap % KW - PAD, c]).reshape(TI * TH * TW, BC)
        if TURNED:
            v = w.load([k, c, (taps - 1 - tap) * N + n0]).reshape(BC, BN)
        else:
            v = w.load([k, n0, tap * deep + c]).reshape(BN, BC).T
        total = tl.dot(a, v, total, input_precision=PRECISION)
    if BIAS:
        n = n0 + tl.arange(0, BN)
        total += tl.load(bias + k.to(tl.int64) * N + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    if RELU:
        total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tile = total.to(out.dtype).reshape(1, TI, TH, TW, BN)
    if GATE:
        tile = tl.where(gate.load([k, b, y, z, n0]) > 0, tile, 0.0).to(out.dtype)
    out.store([k, b, y, z, n0], tile)


@triton.jit
def row_kernel(
    x, dz, dw, db, tiles, each, down: tl.constexpr, across: tl.constexpr, O, C, KH: tl.constexpr, PAD: tl.constexpr,
    PRECISION: tl.constexpr, TI: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dw[part, o, tap, c] for the three taps of one row of the kernel, over a part of the tiles; and db of dz."""
    blocks = tl.cdiv(C, BC)
    row, c0 = tl.program_id(0) % KH, tl.program_id(0) // KH % blocks * BC
    n0 = tl.program_id(0) // KH // blocks * BN
    k, part = tl.program_id(1), tl.program_id(2)
    left, middle, right = tl.zeros((BN, BC), tl.float32), tl.zeros((BN, BC), tl.float32), tl.zeros((BN, BC), tl.float32)
    sums = tl.zeros((BN,), tl.float32)
    for i in range(part * each, tl.minimum(part * each + each, tiles)):
        b, y, z = i // (down * across) * TI, i // across % down * TH, i % across * TW
        d = dz.load([k, b, y, z, n0]).reshape(TI * TH * TW, BN)
        if row == 0 and c0 == 0:
            sums += tl.sum(d.to(tl.float32), 0)
        up = y + row - PAD
        a = x.load([k, b, up, z - PAD, c0]).reshape(TI * TH * TW, BC)
        left = tl.dot(d.T, a, left, input_precision=PRECISION)
        a = x.load([k, b, up, z - PAD + 1, c0]).reshape(TI * TH * TW, BC)
        middle = tl.dot(d.T, a, middle, input_precision=PRECISION)
        a = x.load([k, b, up, z - PAD + 2, c0]).reshape(TI * TH * TW, BC)
        right = tl.dot(d.T, a, right, input_precision=PRECISION)
    slot = (part * tl.num_programs(1) + k).to(tl.int64)
    o, c = n0 + tl.arange(0, BN), c0 + tl.arange(0, BC)
    fine = (o < O)[:, None] & (c < C)[None, :]
    dw += (slot * O + o[:, None]) * (KH * 3 * C) + row * 3 * C + c[None, :]
    tl.store(dw, left, mask=fine)
    tl.store(dw + C, middle, mask=fine)
    tl.store(dw + 2 * C, right, mask=fine)
    if row == 0 and c0 == 0:
        tl.store(db + slot * O + o, sums, mask=o < O)


def slides(x: Tensor, channels: tuple[int, ...], taps: Taps, precision: str) -> bool:
    """Whether these products can be formed so; exact float32 has no use for it."""
    able = not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] >= 9
    whole = all(c % 16 == 0 for c in channels)
    return able and whole and taps.stride == 1 and (precision != "ieee" or x.dtype != torch.float32)


def tile_of(images: int, height: int, width: int, places: int) -> tuple[int, int, int]:
    """Images, rows and columns of a tile with so many places.

    >>> tile_of(10, 28, 28, 128), tile_of(10, 4, 4, 128), tile_of(3, 7, 7, 64)
    ((1, 4, 32), (8, 4, 4), (1, 8, 8))
    """
    tw = min(32, triton.next_power_of_2(width))
    th = min(places // tw, triton.next_power_of_2(height))
    return max(16 // (tw * th), min(places // (tw * th), triton.next_power_of_2(images))), th, tw


def tiled(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def slid(
    x: Tensor, w: Tensor, bias: Tensor | None, gate: Tensor | None, size: tuple[int, int], taps: Taps, turned: bool,
    precision: str,
) -> Tensor:  # fmt: skip
    """`x [K, B, H, W, C]`, `w [K, out, KH, KW, in]` -> `[K, B, *size, out or in]`."""
    k, b, c, n = x.shape[0], x.shape[1], x.shape[4], w.shape[4] if turned else w.shape[1]
    out = torch.empty(k, b, *size, n, dtype=x.dtype, device=x.device)
    bn, bc = min(64, max(16, triton.next_power_of_2(n))), min(DEPTH, c & -c)
    ti, th, tw = tile_of(b, *size, 256 if bn <= 32 else 128)
    down, across, images = triton.cdiv(size[0], th), triton.cdiv(size[1], tw), triton.cdiv(b, ti)
    outs = tiled(out, [1, ti, th, tw, bn])
    slide_kernel[(down * across, k * images, triton.cdiv(n, bn))](
        tiled(x, [1, ti, th, tw, bc]), tiled(w.flatten(2), [1, bc, bn] if turned else [1, bn, bc]),
        outs, outs if gate is None else tiled(gate, [1, ti, th, tw, bn]), x if bias is None else bias,
        images, n, c, across, taps.height * taps.width, taps.width, taps.pad,
        TURNED=turned, BIAS=bias is not None, RELU=taps.relu, GATE=gate is not None, PRECISION=precision,
        TI=ti, TH=th, TW=tw, BN=bn, BC=bc, num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def rowwise(x: Tensor, dz: Tensor, taps: Taps, precision: str) -> tuple[Tensor, Tensor]:
    """The gradients of the weights `[K, out, KH, 3, C]` and the bias `[K, out]`; `dz [K, B, OH, OW, out]`."""
    (k, b, _, _, c), (oh, ow, o) = x.shape, dz.shape[2:]
    bn, bc = min(64, max(16, triton.next_power_of_2(o))), min(DEPTH, c & -c)
    ti, th, tw = tile_of(b, oh, ow, 64 if x.dtype == torch.float32 else 128)
    down, across, images = triton.cdiv(oh, th), triton.cdiv(ow, tw), triton.cdiv(b, ti)
    tiles, blocks = down * across * images, taps.height * triton.cdiv(c, bc) * triton.cdiv(o, bn)
    each = triton.cdiv(tiles, max(1, min(16, tiles, 800 // (k * blocks))))
    parts = triton.cdiv(tiles, each)
    dw = torch.empty(parts, k, o, taps.height, 3, c, device=x.device)
    db = torch.empty(parts, k, o, device=x.device)
    row_kernel[(blocks, k, parts)](
        tiled(x, [1, ti, th, tw, bc]), tiled(dz, [1, ti, th, tw, bn]), dw, db, tiles, each, down, across, o, c,
        taps.height, taps.pad, PRECISION=precision, TI=ti, TH=th, TW=tw, BN=bn, BC=bc, num_warps=4, num_stages=2,
    )  # fmt: skip
    return (dw[0], db[0]) if parts == 1 else (dw.sum(0), db.sum(0))
