"""The first factor of a dense layer: few outputs of many inputs, for K clients with factors of their own."""

from typing import Any

import torch
from torch import Tensor

from sparing.accel.train_cuda.kernels.batched import in_front
from sparing.accel.train_cuda.kernels.dense import gram


class Thin(torch.autograd.Function):
    """`x [B, in]` and `w [r, in]` -> `[B, r]`, the inputs taken in parts, since so few outputs leave a GPU idle."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, precision: str) -> Tensor:
        return Thin.vmap(None, None, x[None], w[None], precision)[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, w, _ = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple:
        x, w = ctx.saved_tensors
        return dz @ w if ctx.needs_input_grad[0] else None, dz.mT @ x, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, precision: str) -> tuple:
        if dims is not None and dims[1] is None:
            return x.movedim(dims[0], 0) @ w.T, 0
        x, w = in_front(info, dims, x, w)
        all_rows = torch.full((1,), w.shape[1], device=w.device)
        return gram(x.contiguous(), w.contiguous(), all_rows, precision), 0
