# pyright: reportPrivateImportUsage=false
# torch._foreach_* are what torch.optim itself is written in, but carry no public name.
"""Dense layers under plain SGD: the step is taken from the factors of the gradient, which is never formed.

The gradient of a dense layer's weight is d^T x, d being the gradient of its outputs and x its inputs. W -= lr d^T x is
one matrix product that adds to W, while forming the gradient first costs writing and reading a second W.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.core.protocols import Phase
from sparing.task.optim import is_plain

LARGE = 1 << 18
"""Weights from which on it pays, measured on one core: a tenth to a quarter less time from here on, none below."""


class Dense(torch.autograd.Function):
    """x W^T + b, which puts (d, x) on a list where autograd wants the gradient of W."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, factors: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.factors = factors
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = grads
        x, weight = ctx.saved_tensors
        ctx.factors.append((d, x))
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        return d @ weight if wants_x else None, None, d.flatten(0, -2).sum(0) if wants_bias else None, None


class OuterLinear(nn.Linear):
    """nn.Linear, which leaves the gradient of its weight as factors while it has a list for them."""

    factors: list[tuple[Tensor, Tensor]] | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.factors is None or input.ndim < 2 or in_other_hands(input):
            return super().forward(input)
        return Dense.apply(input, self.weight, self.bias, self.factors)


def in_other_hands(x: Tensor) -> bool:
    """Within autocast, or within torch.func: then gradients are not what they seem."""
    return torch.is_autocast_enabled(x.device.type) or torch._C._are_functorch_transforms_active()


def recast_dense(model: nn.Module) -> list[OuterLinear]:
    """Turn the large dense layers of this working copy into the ones above."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and is_large(layer.weight)]
    for layer in layers:
        layer.__class__ = OuterLinear
    return layers  # pyright: ignore[reportReturnType]


def is_large(weight: Tensor) -> bool:
    return isinstance(weight, nn.Parameter) and weight.numel() >= LARGE


def ready(layers: list[OuterLinear], phase: Phase) -> list[OuterLinear]:
    """Those of these layers whose weight moves by factors in this phase."""
    for layer in layers:
        layer.factors = [] if is_plain(phase) and layer.weight.requires_grad else None
    return [layer for layer in layers if layer.factors is not None]


def descend(loss: Tensor, params: list[Tensor], layers: list[OuterLinear], lr: float) -> None:
    """A step of plain SGD. A weight that is used elsewhere too moves by the gradient from there as well."""
    for layer in layers:
        (layer.factors or []).clear()  # a gradient taken within the forward may have left something
    if not loss.requires_grad:
        return
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    with torch.no_grad():
        moving = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
        torch._foreach_add_([p for p, _ in moving], [g for _, g in moving], alpha=-lr)
        for layer in layers:
            while layer.factors:
                d, x = layer.factors.pop()
                layer.weight.addmm_(d.flatten(0, -2).T, x.flatten(0, -2), alpha=-lr)
