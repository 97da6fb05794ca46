"""Max pooling over windows that do not overlap, with the ReLU before it: nothing is remembered but its input."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.train_cuda.kernels.batched import in_front

PLACES = 32


@triton.jit
def pool_kernel(
    x, out, dout, dx,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, S: tl.constexpr,
    RELU: tl.constexpr, FLAT: tl.constexpr, BACK: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Forward: the largest of each window. Backward: its gradient to the first place that holds it.

    FLAT: what comes out stands channel by channel, as flattening wants it.
    """
    image = tl.program_id(1).to(tl.int64)
    p, c = tl.program_id(0) * BP + tl.arange(0, BP)[:, None], tl.program_id(2) * BC + tl.arange(0, BC)[None, :]
    inside = (p < OH * OW) & (c < C)
    corner = ((image * H + p // OW * S) * W + p % OW * S) * C + c
    here = (image * C + c) * (OH * OW) + p if FLAT else (image * OH * OW + p) * C + c
    best = tl.load(x + corner, mask=inside, other=0.0)
    for tap in tl.static_range(1, S * S):
        v = tl.load(x + corner + (tap // S * W + tap % S) * C, mask=inside, other=0.0)
        best = tl.maximum(best, v, propagate_nan=tl.PropagateNan.ALL)
    if BACK:
        grad = tl.load(dout + here, mask=inside, other=0.0)
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
        tl.store(out + here, best, mask=inside)


def launch_pool(x: Tensor, out: Tensor, dx: Tensor, size: int, relu: bool, flat: bool, back: bool) -> None:
    """`x [N, H, W, C]`, `out [N, OH, OW, C]`, or `[N, C, OH, OW]` where flat; all dense. Backward, `out` is given."""
    (n, h, w, c), block = x.shape, min(128, triton.next_power_of_2(x.shape[3]))
    oh, ow = h // size, w // size
    grid = (triton.cdiv(oh * ow, PLACES), n, triton.cdiv(c, block))
    pool_kernel[grid](x, out, out, dx, h, w, c, oh, ow, size, relu, flat, back, BP=PLACES, BC=block)


class Pool(torch.autograd.Function):
    """`x [B, C, H, W]` in windows of size by size."""

    @staticmethod
    def forward(x: Tensor, size: int, relu: bool, flat: bool) -> Tensor:
        return Pool.vmap(None, None, x[None], size, relu, flat)[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, *ctx.how = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        return Unpool.apply(*ctx.saved_tensors, dout, *ctx.how), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, size: int, relu: bool, flat: bool) -> tuple:
        (x,) = in_front(info, dims, x)
        k, b, c, h, w = x.shape
        images = x.movedim(2, -1).contiguous().flatten(0, 1)
        places = (h // size, w // size)
        out = torch.empty(k, b, *((c, *places) if flat else (*places, c)), dtype=x.dtype, device=x.device)
        launch_pool(images, out, images, size, relu, flat, back=False)
        return out if flat else out.movedim(-1, 2), 0


class Unpool(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, dout: Tensor, size: int, relu: bool, flat: bool) -> Tensor:
        return Unpool.vmap(None, None, x[None], dout[None], size, relu, flat)[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, dout: Tensor, size: int, relu: bool, flat: bool) -> tuple:
        x, dout = in_front(info, dims, x, dout)
        x, dout = x.movedim(2, -1).contiguous(), (dout if flat else dout.movedim(2, -1)).contiguous()
        whole = x.shape[2] % size == 0 and x.shape[3] % size == 0
        dx = torch.empty_like(x) if whole else torch.zeros_like(x)
        launch_pool(x.flatten(0, 1), dout, dx, size, relu, flat, back=True)
        return dx.movedim(-1, 2), 0
