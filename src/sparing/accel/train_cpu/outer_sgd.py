# pyright: reportPrivateImportUsage=false
# torch._foreach_* are what torch.optim itself is written in, but carry no public name.
"""Dense layers under plain SGD: the step is taken from the factors of the gradient, which is never formed.

The gradient of a dense layer's weight is d^T x, d being the gradient of its outputs and x its inputs. W -= lr d^T x is
one matrix product that adds to W, while forming the gradient first costs writing and reading a second W.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.accel.train_cpu.chains import has_hooks
from sparing.accel.train_cpu.held_steps import Held, HeldDense
from sparing.core.method import Phase
from sparing.core.tree import Tree
from sparing.train.optim import is_plain_sgd

KNOWN = "torch.nn.modules.", "sparing.accel."
LARGE = 1 << 18
"""Weights from which on it pays, measured on one core: a tenth to a quarter less time from here on, none below."""
ROWS = 8
"""Inputs from which on oneDNN multiplies large matrices in less time than BLAS: up to three tenths less."""
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class OuterLayer(Protocol):
    """A layer that leaves the gradient of its weight as factors while it has a list for them."""

    weight: Tensor
    factors: list[tuple[Tensor, Tensor]] | None
    lr: float
    alone: bool  # whether nothing but this layer, once a step, looks at its weight

    def move(self, d: Tensor, x: Tensor) -> None:
        """W -= lr times the gradient that d and x are the factors of."""
        ...


def leave_factors(layer: OuterLayer, d: Tensor, x: Tensor) -> None:
    """A layer whose weight nobody else looks at takes the step at once, since W has just been read."""
    if layer.alone:
        layer.move(d, x)
    elif layer.factors is not None:
        layer.factors.append((d, x))


class OuterDense(torch.autograd.Function):
    """x W^T + b. Where autograd wants the gradient of W, d and x are left to the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "OuterLinear") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return dense_product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = grads
        x, weight = ctx.saved_tensors
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        back = dense_product(d, weight.T) if wants_x else None
        leave_factors(ctx.layer, d, x)
        return back, None, d.flatten(0, -2).sum(0) if wants_bias else None, None


class OuterLinear(nn.Linear):
    """nn.Linear, which does so."""

    factors: list[tuple[Tensor, Tensor]] | None = None
    lr = 0.0
    alone = False
    held: Held | None = None  # where steps are held, the weight is there

    def forward(self, input: Tensor) -> Tensor:
        if self.held is not None:
            self.held.lr = self.lr
            return HeldDense.apply(input, self.weight, self.bias, self.held)
        if self.factors is None or input.ndim < 2 or in_other_hands(input):
            return super().forward(input)
        return OuterDense.apply(input, self.weight, self.bias, self)

    def move(self, d: Tensor, x: Tensor) -> None:
        self.weight.addmm_(d.flatten(0, -2).T, x.flatten(0, -2), alpha=-self.lr)


def dense_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b."""
    few = x.ndim != 2 or len(x) < ROWS
    if few or not ONEDNN or x.device.type != "cpu" or x.dtype != torch.float32 or torch.is_grad_enabled():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def in_other_hands(x: Tensor) -> bool:
    """Within autocast, or within torch.func: then gradients are not what they seem."""
    return torch.is_autocast_enabled(x.device.type) or in_torch_func()


def in_torch_func() -> bool:
    return torch._C._are_functorch_transforms_active()


def recast_dense(model: nn.Module) -> list[OuterLinear]:
    """Turn the large dense layers of this working copy into the ones above."""
    layers = [layer for layer in model.modules() if type(layer) is nn.Linear and is_large(layer.weight)]
    for layer in layers:
        layer.__class__ = OuterLinear
    return layers  # pyright: ignore[reportReturnType]


def look_around(layers: list[OuterLayer], model: nn.Module) -> None:
    alone = bool(layers) and is_transparent(model)
    for layer in layers:
        layer.alone = alone


def is_transparent(model: nn.Module) -> bool:
    """Whether this is a sequence of torch's own layers, none of them and no weight used twice: then all is seen."""
    layers, weights = list(model.modules()), list(model.parameters())
    return (
        len(layers) == len(list(model.named_modules(remove_duplicate=False)))
        and len(weights) == len(list(model.named_parameters(remove_duplicate=False)))
        and not any(has_hooks(layer) for layer in layers)
        and all(isinstance(layer, nn.Sequential) or not layer._modules for layer in layers)
        and all(type(layer).__module__.startswith(KNOWN) for layer in layers)
    )


def is_large(weight: Tensor) -> bool:
    return isinstance(weight, nn.Parameter) and weight.numel() >= LARGE


def held_layers(layers: list[OuterLayer], state: Tree, phases: Sequence[Phase]) -> dict[str, Held]:
    """Let the large dense layers that nobody else looks at hold their steps, where all are plain; by weights' names."""
    names, held = {id(x): name for name, x in state.items()}, {}
    for layer in layers if all(map(is_plain_sgd, phases)) else ():
        if isinstance(layer, OuterLinear) and layer.alone:
            layer.held = held[names[id(layer.weight)]] = Held(layer.weight.data)
    return held


def moving_by_factors(layers: list[OuterLayer], phase: Phase) -> list[OuterLayer]:
    """Those of these layers whose weight moves by factors in this phase."""
    for layer in layers:
        layer.factors = [] if is_plain_sgd(phase) and layer.weight.requires_grad else None
        layer.lr = phase.optimiser.lr
    return [layer for layer in layers if layer.factors is not None]


def descend(loss: Tensor, params: list[Tensor], layers: list[OuterLayer], lr: float) -> None:
    """A step of plain SGD. A weight that is used elsewhere too moves by the gradient from there as well."""
    for layer in layers:
        (layer.factors or []).clear()  # a gradient taken within the forward may have left something
    if not loss.requires_grad:
        return
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    with torch.no_grad():
        moving = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None]
        if moving:
            torch._foreach_add_([p for p, _ in moving], [g for _, g in moving], alpha=-lr)
        for layer in layers:
            while layer.factors:
                layer.move(*layer.factors.pop())
