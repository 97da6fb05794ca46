"""Cross entropy of K clients in one launch each way."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.train_cuda.kernels.batched import in_front

IGNORED = -100
"""torch's mark for a sample without a class."""


@triton.jit
def entropy_kernel(z, y, out, grad, dz, C, IGNORED: tl.constexpr, BACK: tl.constexpr, BC: tl.constexpr):
    """Of one sample: -log softmax(z)[y], or the gradient of z."""
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    label = tl.load(y + i)
    v = tl.load(z + i * C + c, mask=c < C, other=-float("inf")).to(tl.float32)
    top = tl.max(v, 0)
    power = tl.exp(v - top)
    total = tl.sum(power, 0)
    if BACK:
        g = tl.where(label == IGNORED, 0.0, tl.load(grad + i).to(tl.float32))
        d = (power / total - tl.where(c == label, 1.0, 0.0)) * g
        tl.store(dz + i * C + c, d.to(dz.dtype.element_ty), mask=c < C)
    else:
        mine = tl.sum(tl.where(c == label, v - top, 0.0), 0)
        mine = tl.where((label >= 0) & (label < C), mine, float("nan"))
        tl.store(out + i, tl.where(label == IGNORED, 0.0, tl.log(total) - mine))


def launch_entropy(z: Tensor, y: Tensor, out: Tensor, grad: Tensor, dz: Tensor, back: bool) -> None:
    c = z.shape[-1]
    entropy_kernel[(y.numel(),)](
        z, y, out, grad, dz, c, IGNORED=IGNORED, BACK=back, BC=triton.next_power_of_2(c), num_warps=1 if c <= 256 else 4
    )


class Entropy(torch.autograd.Function):
    """`z [B, classes]`, `y [B]` -> `[B]` float32."""

    @staticmethod
    def forward(z: Tensor, y: Tensor) -> Tensor:
        return Entropy.vmap(None, None, z[None], y[None])[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return Slope.apply(*ctx.saved_tensors, grad), None

    @staticmethod
    def vmap(info: Any, dims: Any, z: Tensor, y: Tensor) -> tuple:
        z, y = (t.contiguous() for t in in_front(info, dims, z, y))
        out = torch.empty(y.shape, device=z.device)
        launch_entropy(z, y, out, out, z, back=False)
        return out, 0


class Slope(torch.autograd.Function):
    """The gradient of z."""

    @staticmethod
    def forward(z: Tensor, y: Tensor, grad: Tensor) -> Tensor:
        return Slope.vmap(None, None, z[None], y[None], grad[None])[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, z: Tensor, y: Tensor, grad: Tensor) -> tuple:
        z, y, grad = (t.contiguous() for t in in_front(info, dims, z, y, grad))
        dz = torch.empty_like(z)
        launch_entropy(z, y, grad, grad, dz, back=True)
        return dz, 0
