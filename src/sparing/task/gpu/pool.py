"""Max pooling over windows that do not overlap, with the ReLU before it: nothing is remembered but its input."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.task.gpu.batched import in_front

BLOCK = 512


@triton.jit
def pool_kernel(
    x, out, dout, dx, n,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, S: tl.constexpr,
    RELU: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Forward: the largest of each window. Backward: its gradient to the first place that holds it."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    c, j = i % C, i // C
    corner = ((j // (OW * OH) * H + j // OW % OH * S) * W + j % OW * S) * C + c
    inside = i < n
    best = tl.load(x + corner, mask=inside, other=0.0)
    for tap in tl.static_range(1, S * S):
        v = tl.load(x + corner + (tap // S * W + tap % S) * C, mask=inside, other=0.0)
        best = tl.maximum(best, v, propagate_nan=tl.PropagateNan.ALL)
    if BACK:
        grad = tl.load(dout + i, mask=inside, other=0.0)
        if RELU:
            grad = tl.where(best > 0, grad, 0.0).to(grad.dtype)
        free = inside
        for tap in tl.static_range(0, S * S):
            at = corner + (tap // S * W + tap % S) * C
            hit = free & (tl.load(x + at, mask=inside, other=0.0) == best)
            tl.store(dx + at, tl.where(hit, grad, 0.0).to(grad.dtype), mask=inside)
            free = free & ~hit
    else:
        if RELU:
            best = tl.maximum(best, 0.0, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + i, best, mask=inside)


def launch(x: Tensor, out: Tensor, dout: Tensor, dx: Tensor, size: int, relu: bool, back: bool) -> None:
    """`x [N, H, W, C]`, `out [N, OH, OW, C]`, both dense."""
    grid = (triton.cdiv(out.numel(), BLOCK),)
    pool_kernel[grid](x, out, dout, dx, out.numel(), *x.shape[1:], *out.shape[1:3], size, relu, back, BLOCK=BLOCK)


class Pool(torch.autograd.Function):
    """`x [B, C, H, W]` in windows of size by size."""

    @staticmethod
    def forward(x: Tensor, size: int, relu: bool) -> Tensor:
        return Pool.vmap(None, None, x[None], size, relu)[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, ctx.size, ctx.relu = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        return Unpool.apply(*ctx.saved_tensors, dout, ctx.size, ctx.relu), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: int, relu: bool) -> tuple:
        (x,) = in_front(info, dims, x)
        k, b, c, h, w = x.shape
        out = torch.empty(k, b, h // size, w // size, c, dtype=x.dtype, device=x.device)
        flat = x.movedim(2, -1).contiguous().flatten(0, 1)
        launch(flat, out.flatten(0, 1), flat, flat, size, relu, back=False)
        return out.movedim(-1, 2), 0


class Unpool(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dout: Tensor, size: int, relu: bool) -> Tensor:
        return Unpool.vmap(None, None, x[None], dout[None], size, relu)[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, dout: Tensor, size: int, relu: bool) -> tuple:
        x, dout = (t.movedim(2, -1).contiguous() for t in in_front(info, dims, x, dout))
        whole = x.shape[2] % size == 0 and x.shape[3] % size == 0
        dx = torch.empty_like(x) if whole else torch.zeros_like(x)
        launch(x.flatten(0, 1), dout.flatten(0, 1), dout, dx, size, relu, back=True)
        return dx.movedim(-1, 2), 0
