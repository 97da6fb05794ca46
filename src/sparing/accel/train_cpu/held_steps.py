"""Large dense layers in bfloat16 under plain SGD: steps are held as factors, and added to the weight many at a time.

With a step at once (`outer_sgd`), all of W would be written for each batch, in float32 and again in bfloat16. Here it
stays what it was while steps gather, W + D^T H as in `implicit`: H `[held, in]` are the inputs, D `[held, out]`
the gradients of the outputs, times -lr. So a forward is x W^T + b + (x H^T) D, and a backward d W + (d D^T) H. Clients
that start from one model read the same W, which nobody copies.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOM = 64
"""Samples whose steps are held."""


class Held:
    """One layer's weight, and the steps that are not in it yet."""

    def __init__(self, weight: Tensor):
        """`weight` is room for one that is no longer what the client began with."""
        self.own = self.weight = self.first = weight
        self.half = self.first_half = weight.new_empty(0, dtype=torch.bfloat16)
        self.inputs = weight.new_empty(ROOM, weight.shape[1], dtype=torch.bfloat16)
        self.moves = weight.new_empty(ROOM, weight.shape[0])
        self.count, self.lr = 0, 0.0

    def begin(self, weight: Tensor) -> None:
        """A client starts with this weight, which is only read."""
        if weight.data_ptr() != self.first.data_ptr():
            self.first, self.first_half = weight, weight.bfloat16()
        self.weight, self.half, self.count = self.first, self.first_half, 0

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        z = F.linear(x, self.half, bias if bias is None else bias.bfloat16()).to(self.weight.dtype)
        if self.count:
            z += (x @ self.inputs[: self.count].T).to(z.dtype) @ self.moves[: self.count]
        return z

    def backward(self, d: Tensor) -> Tensor:
        back = d.bfloat16() @ self.half
        if self.count:
            back.addmm_((d @ self.moves[: self.count].T).bfloat16(), self.inputs[: self.count])
        return back

    def hold(self, d: Tensor, x: Tensor) -> None:
        """One step more, by the gradient d^T x."""
        if self.count + len(x) > ROOM:
            torch.addmm(self.weight, *self.factors(), out=self.own)
            self.weight, self.half, self.count = self.own, self.own.bfloat16(), 0
        if len(x) > ROOM:
            self.weight.addmm_(d.T, x.to(d.dtype), alpha=-self.lr)
            self.half = self.weight.bfloat16()
            return
        now = slice(self.count, self.count + len(x))
        self.inputs[now], self.moves[now] = x, d * -self.lr
        self.count = now.stop

    def added(self, out: Tensor) -> None:
        """All steps together, written there."""
        torch.mm(*self.factors(), out=out)
        if self.weight is self.own:
            out += self.own - self.first

    def factors(self) -> tuple[Tensor, Tensor]:
        moves, inputs = self.moves[: self.count], self.inputs[: self.count]
        return moves.T, inputs.to(moves.dtype)


class HeldDense(torch.autograd.Function):
    """x W^T + b; a step is held instead of giving autograd a gradient of W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, held: Held) -> Tensor:
        ctx.shape, ctx.held = x.shape, held
        with torch.autocast(x.device.type, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).bfloat16()
            ctx.save_for_backward(rows)
            return held.forward(rows, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d,), (rows,), held = grads, ctx.saved_tensors, ctx.held
        d = d.reshape(len(rows), -1)
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        back = held.backward(d).view(ctx.shape) if wants_x else None
        if wants_weight:
            held.hold(d, rows)
        return back, None, d.sum(0) if wants_bias else None, None
