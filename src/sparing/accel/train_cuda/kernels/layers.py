"""A working copy's layers turned into those of this folder, where they fit."""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.accel.keyed_classes import KeyedDropout
from sparing.accel.train_cpu.chains import has_hooks
from sparing.accel.train_cuda.kernels.convolve import Convolution
from sparing.accel.train_cuda.kernels.dense import Dense
from sparing.accel.train_cuda.kernels.drop import Drop
from sparing.accel.train_cuda.kernels.gather import Taps
from sparing.accel.train_cuda.kernels.pool import Pool
from sparing.accel.train_cuda.kernels.thin import Thin
from sparing.parts.factors import FactoredConv, FactoredLinear, paced_factors
from sparing.train.keyed_layers import KeyedStep

DOTS = {"float32": "tf32x3", "tf32": "tf32", "bf16": "tf32"}
"""How kernels multiply float32: in three products of TF32 parts, as exact as one, or in one; bf16 as it is."""
THIN, FEW = 64, 32
"""Ranks, and samples of a client, up to which the first factor of a dense layer is a kernel of ours."""


class Past:
    """What dense layers whose weights are not formed look at and leave behind, in one step of one client.

    By the name of the layer: inputs `[visits, in]`, moves `[visits, out]` and a probe `[B, out]` of zeros; in `step`
    how many steps were before; and in `saw` what went in.
    """

    def __init__(self) -> None:
        self.step = torch.zeros(1, dtype=torch.int64)
        self.of: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self.saw: dict[str, Tensor] = {}


class GpuConv(nn.Conv2d):
    taps: Taps
    dots: str

    def forward(self, input: Tensor) -> Tensor:
        return Convolution.apply(input.to(self.weight.dtype), self.weight, self.bias, self.taps, self.dots)  # type: ignore[return-value]


class GpuFactored(FactoredConv):
    """The product of both factors takes the place of two thin convolutions: it is small, and one kernel is quicker."""

    taps: Taps
    dots: str

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return Convolution.apply(x.to(weight.dtype), weight, self.bias, self.taps, self.dots)  # type: ignore[return-value]


class GpuThin(FactoredLinear):
    dots: str

    def forward(self, x: Tensor) -> Tensor:
        a, b = paced_factors(self.a, self.b)
        x = x.to(b.dtype)
        z = Thin.apply(x, b, self.dots) if x.ndim == 2 and len(x) <= FEW else F.linear(x, b)
        return F.linear(z, a, self.bias)  # type: ignore[arg-type]


class GpuPool(nn.MaxPool2d):
    relu: bool
    flat: bool

    def forward(self, input: Tensor) -> Tensor:
        return Pool.apply(input, self.kernel_size, self.relu, self.flat)  # type: ignore[return-value]


class GpuDropout(nn.Dropout):
    step: KeyedStep

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not self.p:
            return input
        self.step.draws += 1
        return Drop.apply(input, self.step.key, self.step.draws, self.p)  # type: ignore[return-value]


class GpuDense(nn.Linear):
    past: Past
    name: str
    dots: str

    def forward(self, input: Tensor) -> Tensor:
        input = input.to(self.weight.dtype)
        if self.name not in self.past.of:
            return F.linear(input, self.weight, self.bias)
        self.past.saw[self.name] = input
        z = Dense.apply(input, self.weight, *self.past.of[self.name], self.past.step, self.dots)
        return z if self.bias is None else z + self.bias  # type: ignore[return-value]


def quicken(module: nn.Module, precision: str) -> Past:
    """Turn the layers of this working copy into the ones above."""
    past, dots = Past(), DOTS[precision] if has_tf32(module) else "ieee"
    join_relus(module)
    for name, layer in module.named_modules():
        if fits_conv(layer):
            taps = Taps(*layer.kernel_size, layer.stride[0], layer.padding[0], *relu_flags(layer))
            turn(layer, GpuConv, taps=taps, dots=dots)
        elif fits_factored(layer):
            side, stride, pad = layer.a.shape[2], layer.down["stride"][0], layer.down["padding"][0]
            turn(layer, GpuFactored, taps=Taps(side, side, stride, pad, *relu_flags(layer)), dots=dots)
        elif type(layer) is FactoredLinear and len(layer.b) <= THIN:
            turn(layer, GpuThin, dots=dots)
        elif fits_pool(layer):
            turn(layer, GpuPool, relu=getattr(layer, "relu", False), flat=getattr(layer, "flat", False))
        elif type(layer) is KeyedDropout:
            turn(layer, GpuDropout)
        elif type(layer) is nn.Linear:
            turn(layer, GpuDense, past=past, name=name, dots=dots)
    return past


def kernel_weights(module: nn.Module) -> set[str]:
    """Names of weights that kernels want of every client."""
    kinds = nn.Conv2d, FactoredConv, FactoredLinear
    layers = [(prefix, layer) for prefix, layer in module.named_modules() if isinstance(layer, kinds)]
    return {f"{prefix}.{name}" for prefix, layer in layers for name, _ in layer.named_parameters()}


def has_tf32(module: nn.Module) -> bool:
    device = next((x.device for x in module.parameters()), torch.device("cpu"))
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


def join_relus(module: nn.Module) -> None:
    """A ReLU right behind a convolution or before a pool becomes part of it; layers learn what comes next to them."""
    for chain in [part for part in module.modules() if type(part) is nn.Sequential]:
        layers = list(chain)
        for i, (layer, after) in enumerate(pairwise([*layers, None])):
            before = layers[i - 1] if i else None
            if type(layer) is nn.ReLU and not has_hooks(layer):
                host = after if fits_pool(after) else before if convolves(before) else None
                if host is None:
                    continue
                tell(host, "relu")
                chain[i] = nn.Identity()
                if host is before and convolves(after):
                    tell(before, "zeroed")
                    tell(after, "zeroes")
            elif fits_pool(layer):
                rest = [x for x in layers[i + 1 :] if type(x) is not KeyedDropout]
                if rest and type(rest[0]) is nn.Flatten:
                    tell(layer, "flat")


def tell(layer: Any, what: str) -> None:
    object.__setattr__(layer, what, True)


def relu_flags(layer: nn.Module) -> list[bool]:
    """What a convolution was told, as `Taps` wants it."""
    return [getattr(layer, name, False) for name in ("relu", "zeroed", "zeroes")]


def turn(layer: nn.Module, into: type, **about: Any) -> None:
    layer.__class__ = into
    for name, value in about.items():
        object.__setattr__(layer, name, value)


def convolves(layer: Any) -> bool:
    return fits_conv(layer) or fits_factored(layer)


def fits_conv(layer: Any) -> bool:
    """Square, equally padded with zeros, in one group."""
    if type(layer) is not nn.Conv2d or layer.groups != 1 or layer.padding_mode != "zeros" or has_hooks(layer):
        return False
    if isinstance(layer.padding, str) or set(layer.dilation) != {1}:
        return False
    same = all(len(set(pair)) == 1 for pair in (layer.kernel_size, layer.stride, layer.padding))
    return same and layer.padding[0] < layer.kernel_size[0]


def fits_factored(layer: Any) -> bool:
    """The same of a convolution in two factors."""
    if type(layer) is not FactoredConv or isinstance(layer.down["padding"], str) or has_hooks(layer):
        return False
    (high, pad), (wide, other) = ([way[key] for key in ("stride", "padding")] for way in (layer.down, layer.across))
    side = layer.a.shape[2]
    if len(layer.kernel) != 2:
        return False
    flat = layer.down["dilation"] == layer.across["dilation"] == (1, 1)
    return flat and high[0] == wide[1] and pad[0] == other[1] < side == layer.b.shape[3]


def fits_pool(layer: Any) -> bool:
    """Windows that do not overlap and lie inside."""
    if type(layer) is not nn.MaxPool2d or not isinstance(layer.kernel_size, int) or has_hooks(layer):
        return False
    plain = layer.padding == 0 and layer.dilation == 1 and not layer.ceil_mode and not layer.return_indices
    return plain and layer.stride in (layer.kernel_size, None)


@torch.no_grad()
def used_once(module: nn.Module, x: Tensor) -> set[str]:
    """Names of dense layers that one forward goes through exactly once, with rows of numbers."""
    calls: dict[str, list[int]] = {}
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: calls.setdefault(name, []).append(args[0].ndim))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    was = module.training
    module.eval()(x)
    module.train(was)
    for hook in hooks:
        hook.remove()
    return {name for name, seen in calls.items() if seen == [2]}
