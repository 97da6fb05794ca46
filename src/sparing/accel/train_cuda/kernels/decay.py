"""A step of a layer that stands as two factors, A B, of which |A B|^2 is kept small."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.parts.factors import along_factors, factor_pace

PARTS, MOST = 28, 64
"""Stretches of a long factor that are worked on at once; the largest rank of which a tile fits on the chip."""


@triton.jit
def step_kernel(b, near, grad, outer, inner, r, n, length, lr, strength, R: tl.constexpr, BL: tl.constexpr):
    """b -= lr * grad + strength * outer b, and near = b; inner[part] = b b^T of a stretch of columns, before that."""
    k, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    i = tl.arange(0, R)
    square, within = i[:, None] * r + i[None, :], (i < r)[:, None] & (i < r)[None, :]
    left = tl.load(outer + k * r * r + square, mask=within, other=0.0)
    total = tl.zeros((R, R), tl.float32)
    end = tl.minimum((part + 1) * length, n)
    for start in range(part * length, end, BL):
        at = start + tl.arange(0, BL)
        place, fine = (k * r + i[:, None]) * n + at[None, :], (i < r)[:, None] & (at < end)[None, :]
        x = tl.load(b + place, mask=fine, other=0.0)
        g = tl.load(grad + place, mask=fine, other=0.0).to(tl.float32)
        total = tl.dot(x, tl.trans(x), total, input_precision="tf32")
        x = x - strength * tl.dot(left, x, input_precision="tf32") - lr * g
        tl.store(b + place, x, mask=fine)
        tl.store(near + place, x.to(near.dtype.element_ty), mask=fine)
    tl.store(inner + (part * tl.num_programs(1) + k) * r * r + square, total, mask=within)


def step_together(a_K: Tensor, b_K: Tensor, near_K: Tensor, grad_K: Tensor, lr: float, decay: float) -> None:
    """B -= lr (grad + decay A^T A B) and A -= lr decay A B B^T, in place: float32 `[K, m, r]` and `[K, r, n]`.

    The decay is in the layer's `factor_pace`, as the gradient is. `near_K` becomes B as well, in fewer bits. What is
    decayed may be multiplied in TF32: it is far smaller than what it is taken from.
    """
    (k, r, n), (of_a, of_b) = b_K.shape, along_factors(factor_pace(a_K, b_K), a_K)
    outer = of_b * (a_K.mT @ a_K)
    length = triton.cdiv(triton.cdiv(n, PARTS), 128) * 128
    parts = torch.empty(triton.cdiv(n, length), k, r, r, device=b_K.device)
    step_kernel[(len(parts), k)](
        b_K, near_K, grad_K.contiguous(), outer, parts, r, n, length, lr, lr * decay,
        R=max(16, triton.next_power_of_2(r)), BL=128, num_warps=8, num_stages=2,
    )  # fmt: skip
    a_K.copy_(torch.baddbmm(a_K, a_K, parts.sum(0) * of_a, alpha=-lr * decay))
