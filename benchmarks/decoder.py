"""A decoder of TinyLlama's shapes in plain torch: root mean square norms, rotated positions, shared keys, gated layers.

Written so that many clients can run side by side (`vmap`); `kernel` says how attention is computed: `written` out in
products, or `sdpa`, torch's own kernel.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DecoderShape(NamedTuple):
    layers: int = 22
    hidden: int = 2048
    heads: int = 32
    shared: int = 4  # heads of keys and values
    inner: int = 5632
    vocabulary: int = 32000
    length: int = 256
    kernel: str = "written"


class RootNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype) * self.weight


class SelfAttention(nn.Module):
    def __init__(self, shape: DecoderShape):
        super().__init__()
        self.heads, self.shared, self.kernel = shape.heads, shape.shared, shape.kernel
        width = shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.shared * width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.shared * width, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q = rotated(self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3), turn)
        k, v = (p(x).unflatten(-1, (self.shared, -1)).transpose(-2, -3) for p in (self.k_proj, self.v_proj))
        times = self.heads // self.shared
        k, v = (one.repeat_interleave(times, dim=-3) for one in (rotated(k, turn), v))
        if self.kernel == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool, device=x.device).triu(1)
            score = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(later, -torch.inf)
            out = score.float().softmax(-1).to(v.dtype) @ v
        return self.o_proj(out.transpose(-2, -3).flatten(-2))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """`x [..., T, width]` turned by `turn [2, T, width / 2]`, cosines and sines."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = turn.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class DecoderBlock(nn.Module):
    def __init__(self, shape: DecoderShape):
        super().__init__()
        self.before, self.self_attn, self.between = RootNorm(shape.hidden), SelfAttention(shape), RootNorm(shape.hidden)
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.self_attn(self.before(x), turn)
        y = self.between(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    """Weights are drawn as TinyLlama's begin: normal, with standard deviation 0.02.

    >>> tiny = DecoderShape(2, 16, 4, 2, 32, 50, 8)
    >>> Decoder(tiny)(torch.zeros(3, 8, dtype=torch.int64)).shape
    torch.Size([3, 8, 50])
    """

    turn: Tensor

    def __init__(self, shape: DecoderShape, dtype: torch.dtype = torch.float32):
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            self.embed = torch.nn.utils.skip_init(nn.Embedding, shape.vocabulary, shape.hidden, dtype=dtype)
            self.layers = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
            self.norm = RootNorm(shape.hidden)
            self.lm_head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        finally:
            torch.set_default_dtype(before)
        width = shape.hidden // shape.heads
        pace = 10000.0 ** (-torch.arange(0, width, 2) / width)
        angle = torch.arange(shape.length)[:, None] * pace
        self.register_buffer("turn", torch.stack([angle.cos(), angle.sin()]), persistent=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.turn[:, : tokens.shape[-1]])
        return self.lm_head(self.norm(x))
