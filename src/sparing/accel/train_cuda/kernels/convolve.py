"""Convolutions of K clients with weights of their own, under vmap and autograd."""

from typing import Any

import torch
from torch import Tensor

from sparing.accel.train_cuda.kernels.batched import axes_apart, in_front
from sparing.accel.train_cuda.kernels.gather import Taps, correlated, gathered_taps
from sparing.accel.train_cuda.kernels.slide import rowwise, slid, slides


def channels_last_rows(x: Tensor) -> Tensor:
    """`[K, B, C, H, W]` as the kernels read it; nothing is copied where it already stands so."""
    return x.movedim(2, -1).contiguous()


class Convolution(torch.autograd.Function):
    """`x [B, C, H, W]`, `w [out, C, KH, KW]`, `bias [out]` or None."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, bias: Tensor | None, taps: Taps, precision: str) -> Tensor:
        rows = x[None], w[None], bias if bias is None else bias[None]
        return Convolution.vmap(None, None, *rows, taps, precision)[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, w, _, ctx.taps, ctx.precision = inputs
        ctx.save_for_backward(x, w, output)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple:
        x, w, y = ctx.saved_tensors
        if ctx.taps.relu and not ctx.taps.zeroed:
            dz = torch.ops.aten.threshold_backward(dz, y, 0)
        dx = ConvolutionBack.apply(dz, w, x, ctx.taps, ctx.precision) if ctx.needs_input_grad[0] else None
        dw, db = Correlation.apply(x, dz, ctx.taps, ctx.precision)
        return dx, dw, db if ctx.needs_input_grad[2] else None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, bias: Tensor | None, taps: Taps, precision: str) -> tuple:
        x, w, bias = in_front(info, dims, x, w, bias)
        x, w = channels_last_rows(x), channels_last_rows(w)
        height, width = ((n + 2 * taps.pad - t) // taps.stride + 1 for n, t in zip(x.shape[2:4], taps[:2], strict=True))
        bias = bias if bias is None else bias.contiguous()
        if slides(x, (x.shape[4], w.shape[1]), taps, precision):
            out = slid(x, w, bias, None, (height, width), taps, False, precision)
        else:
            out = gathered_taps(x, w, bias, (height, width), taps, 1, precision)
        return out.movedim(-1, 2), 0


class ConvolutionBack(torch.autograd.Function):
    """The gradient of the images `x`: a convolution of `dz` with the weights turned round."""

    @staticmethod
    def forward(dz: Tensor, w: Tensor, x: Tensor, taps: Taps, precision: str) -> Tensor:
        return ConvolutionBack.vmap(None, None, dz[None], w[None], x[None], taps, precision)[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, dz: Tensor, w: Tensor, x: Tensor, taps: Taps, precision: str) -> tuple:
        dz, w, x = (channels_last_rows(t) for t in in_front(info, dims, dz, w, x))
        back = Taps(taps.height, taps.width, 1, taps.height - 1 - taps.pad)
        size = (x.shape[2], x.shape[3])
        if slides(dz, (dz.shape[4], x.shape[4]), taps, precision):
            return slid(dz, w, None, x if taps.zeroes else None, size, back, True, precision).movedim(-1, 2), 0
        turned = w.flip(2, 3).transpose(1, 4).contiguous()
        dx = gathered_taps(dz, turned, None, size, back, taps.stride, precision)
        return (torch.ops.aten.threshold_backward(dx, x, 0) if taps.zeroes else dx).movedim(-1, 2), 0


class Correlation(torch.autograd.Function):
    """The gradients of weights and bias."""

    @staticmethod
    def forward(x: Tensor, dz: Tensor, taps: Taps, precision: str) -> tuple[Tensor, Tensor]:
        return axes_apart(Correlation.vmap(None, None, x[None], dz[None], taps, precision)[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, dz: Tensor, taps: Taps, precision: str) -> tuple:
        x, dz = (channels_last_rows(t) for t in in_front(info, dims, x, dz))
        rows = taps.width == 3 and slides(x, (x.shape[4], dz.shape[4]), taps, precision)
        dw, db = (rowwise if rows else correlated)(x, dz, taps, precision)
        return (dw.movedim(-1, 2).to(x.dtype), db.to(x.dtype)), (0, 0)
