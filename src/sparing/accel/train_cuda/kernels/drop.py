"""Dropout drawn from the keys of `core.keys`, drawn again in the backward instead of being remembered."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparing.accel.cuda.draws import mix_words
from sparing.accel.train_cuda.kernels.batched import in_front
from sparing.core.keys import GOLDEN

BLOCK = 1024


@triton.jit
def drop_kernel(
    x, keys, out, n, p, scale, DRAW: tl.constexpr, GOLDEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    k = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = mix_words(tl.load(keys + k).to(tl.uint64, bitcast=True) + DRAW)
    word = mix_words(key + (i + 1).to(tl.uint64) * GOLDEN)
    keep = (word >> 40).to(tl.float32) * (1.0 / 16777216) >= p
    v = tl.load(x + k * n + i, mask=i < n, other=0.0)
    tl.store(out + k * n + i, (v * tl.where(keep, scale, 0.0)).to(v.dtype), mask=i < n)


class Drop(torch.autograd.Function):
    """`x` of one client, its key (int64), which draw of the step it is, and the share that goes."""

    @staticmethod
    def forward(x: Tensor, key: Tensor, draw: int, p: float) -> Tensor:
        return Drop.vmap(None, None, x[None], key[None], draw, p)[0][0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, key, ctx.draw, ctx.p = inputs
        ctx.save_for_backward(key)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple:
        return Drop.apply(dout, *ctx.saved_tensors, ctx.draw, ctx.p), None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, key: Tensor, draw: int, p: float) -> tuple:
        x, key = (t.contiguous() for t in in_front(info, dims, x, key))
        out, n = torch.empty_like(x), x[0].numel()
        grid = (triton.cdiv(n, BLOCK), len(x))
        scale, word = 1 / (1 - p) if p < 1 else 0.0, draw * 3 * GOLDEN % 2**64
        drop_kernel[grid](x, key, out, n, p, scale, DRAW=word, GOLDEN=GOLDEN, BLOCK=BLOCK)
        return out, 0
