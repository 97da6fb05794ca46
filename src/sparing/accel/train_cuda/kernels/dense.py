"""Dense layers of K clients whose weights are never formed: W = W0 + moves^T inputs, as in `train_cpu.implicit`."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.train_cuda.kernels.batched import in_front

PARTS = 14


@triton.jit
def gram_kernel(
    h, past, step, out, B, V, n, rows, PRECISION: tl.constexpr, BB: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr
):
    """out[part, b, v] = sum over a part of the features of h[b] * past[v]; v was visited in an earlier step."""
    k, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    b, v = tl.arange(0, BB), tl.arange(0, BV)
    seen = tl.minimum(tl.load(step) * B, V)
    h += k * B * n
    past += k * V * n
    total = tl.zeros((BB, BV), tl.float32)
    end = tl.minimum((part + 1) * rows, n)
    for l0 in range(part * rows, end, BL):
        at = l0 + tl.arange(0, BL)
        x = tl.load(h + b[:, None] * n + at[None, :], mask=(b < B)[:, None] & (at < end)[None, :], other=0.0)
        y = tl.load(past + v[:, None] * n + at[None, :], mask=(v < seen)[:, None] & (at < end)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)
    out += (part * tl.num_programs(1) + k) * B * V
    tl.store(out + b[:, None] * V + v[None, :], total, mask=(b < B)[:, None] & (v < V)[None, :])


@triton.jit
def spread_moves_kernel(
    base, p, past, step, out, B, V, n, PRECISION: tl.constexpr, BB: tl.constexpr, BV: tl.constexpr, BL: tl.constexpr
):
    """out[b, l] = base[b, l] + sum over visits in earlier steps of p[b, v] * past[v, l]."""
    k = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BL + tl.arange(0, BL)
    b, v = tl.arange(0, BB), tl.arange(0, BV)
    seen = tl.minimum(tl.load(step) * B, V)
    x = tl.load(p + k * B * V + b[:, None] * V + v[None, :], mask=(b < B)[:, None] & (v < V)[None, :], other=0.0)
    y = tl.load(past + (k * V + v[:, None]) * n + at[None, :], mask=(v < seen)[:, None] & (at < n)[None, :], other=0.0)
    place, fine = (k * B + b[:, None]) * n + at[None, :], (b < B)[:, None] & (at < n)[None, :]
    total = tl.load(base + place, mask=fine, other=0.0).to(tl.float32)
    total = tl.dot(x, y, total, input_precision=PRECISION)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=fine)


@triton.jit
def put_kernel(x, past, step, B, V, n, scale, BL: tl.constexpr):
    """past[step * B + b] = x[b] * scale."""
    k, b = tl.program_id(1) // B, tl.program_id(1) % B
    at = tl.program_id(0) * BL + tl.arange(0, BL)
    v = tl.load(x + tl.program_id(1).to(tl.int64) * n + at, mask=at < n, other=0.0)
    row = k.to(tl.int64) * V + tl.load(step) * B + b
    tl.store(past + row * n + at, (v.to(tl.float32) * scale).to(past.dtype.element_ty), mask=at < n)


def tile(n: int) -> int:
    return max(16, triton.next_power_of_2(n))


def stretch(visits: int) -> int:
    """Features at once: a tile of all visits must fit on the chip."""
    return 128 if tile(visits) <= 64 else 32


def gram(h: Tensor, past: Tensor, step: Tensor, precision: str) -> Tensor:
    """`h [K, B, n]`, `past [K, V, n]` -> `[K, B, V]`."""
    (k, b, n), v = h.shape, past.shape[1]
    rows = triton.cdiv(triton.cdiv(n, PARTS), 128) * 128
    parts = triton.cdiv(n, rows)
    out = torch.empty(parts, k, b, v, device=h.device)
    gram_kernel[(parts, k)](
        h, past, step, out, b, v, n, rows, precision, BB=tile(b), BV=tile(v), BL=stretch(v), num_warps=4, num_stages=2
    )
    return out.sum(0).to(h.dtype)


def spread_moves(base: Tensor, p: Tensor, past: Tensor, step: Tensor, precision: str) -> Tensor:
    """`base [K, B, n] + p [K, B, V] past [K, V, n]`."""
    (k, b, n), v = base.shape, past.shape[1]
    out = torch.empty_like(base)
    grid = (triton.cdiv(n, stretch(v)), k)
    spread_moves_kernel[grid](
        base, p, past, step, out, b, v, n, precision, BB=tile(b), BV=tile(v), BL=stretch(v), num_warps=4
    )
    return out


def put_rows(x: Tensor, past: Tensor, step: Tensor, scale: float) -> None:
    """`x [K, B, n]` becomes what was visited in this step: `past [K, V, n]`."""
    (k, b, n), block = x.shape, min(1024, tile(x.shape[2]))
    put_kernel[(triton.cdiv(n, block), k * b)](x.contiguous(), past, step, b, past.shape[1], n, scale, BL=block)


class Dense(torch.autograd.Function):
    """`x [B, in]` through `w [out, in] + moves^T inputs`, plus `probe [B, out]`, whose gradient is the output's.

    `step [1]` is the number of steps before, the same for all clients.
    """

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, inputs: Tensor, moves: Tensor, probe: Tensor, step: Tensor, precision: str
    ) -> Tensor:
        rows = (t[None] for t in (x, w, inputs, moves, probe))
        return Dense.vmap(None, None, *rows, step, precision)[0][0]  # type: ignore[misc]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, w, past, moves, _, step, ctx.precision = inputs
        ctx.save_for_backward(w, past, moves, step)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple:
        dx = Through.apply(dz, *ctx.saved_tensors, ctx.precision) if ctx.needs_input_grad[0] else None
        return dx, None, None, None, dz, None, None

    @staticmethod
    def vmap(
        info: Any, dims: Any, x: Tensor, w: Tensor, inputs: Tensor, moves: Tensor, probe: Tensor, step: Tensor,
        precision: str,
    ) -> tuple:  # fmt: skip
        shared = dims is not None and dims[1] is None
        x, each, inputs, moves, probe = in_front(info, dims, x, w, inputs, moves, probe)
        z = (x.flatten(0, 1) @ w.T).unflatten(0, x.shape[:2]) if shared else torch.bmm(x, each.mT)
        past = gram(x.contiguous(), inputs, step, precision)
        return torch.baddbmm(z + probe, past, moves), 0


class Through(torch.autograd.Function):
    """The gradient of the inputs."""

    @staticmethod
    def forward(dz: Tensor, w: Tensor, inputs: Tensor, moves: Tensor, step: Tensor, precision: str) -> Tensor:
        rows = (t[None] for t in (dz, w, inputs, moves))
        return Through.vmap(None, None, *rows, step, precision)[0][0]  # type: ignore[misc]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, dims: Any, dz: Tensor, w: Tensor, inputs: Tensor, moves: Tensor, step: Tensor, precision: str
    ) -> tuple:
        shared = dims is not None and dims[1] is None
        dz, each, inputs, moves = in_front(info, dims, dz, w, inputs, moves)
        base = (dz.flatten(0, 1) @ w).unflatten(0, dz.shape[:2]) if shared else torch.bmm(dz, each)
        return spread_moves(base, torch.bmm(dz, moves.mT), inputs, step, precision), 0
