"""Networks with fewer units in every hidden layer, as HeteroFL and Split-Mix need them.

A layer of c units keeps the first ceil(ratio c). The inputs of the first layer and the outputs of the last stay whole,
so every tensor of a narrower network is the leading block of the full one. A width depends on the full width alone:
where two paths of a residual network meet, they fit. A dense layer after a flattened convolution keeps all places of
the channels that are left.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sparing.core.errors import MethodError
from sparing.core.tree import Kind, Layout

Shape = tuple[int, ...]


def units_kept(units: int, ratio: float) -> int:
    """How many of so many units stay.

    >>> units_kept(64, 1 / 16), units_kept(10, 0.25), units_kept(3, 0.1), units_kept(100, 0.07)
    (4, 3, 1, 7)
    """
    return math.ceil(units * ratio - 1e-9)


def leading_block(x: Tensor, shape: Shape) -> Tensor:
    """The first entries along every axis: `[K, *full]` -> `[K, *shape]`."""
    return x if x.shape[1:] == shape else x[(slice(None), *(slice(n) for n in shape))].contiguous()


def narrower_layout(layout: Layout, ratio: float) -> Layout:
    """The layout of a network `ratio` times as wide, without what methods put beside it: they will do so again."""
    shapes = {name: shape for name, shape in layout.shapes.items() if name not in layout.extra}
    dtypes, kinds = {name: layout.dtypes[name] for name in shapes}, dict(layout.kinds)
    if ratio < 1:
        refuse_others(shapes, layout)
        shapes |= inner_shapes(shapes, kinds, ratio)
    for name, kind in kinds.items():
        kinds[name] = kind._replace(groups=shapes[name][0]) if kind.groups > 1 and ratio < 1 else kind
    return Layout(shapes, dtypes, layout.buffers - layout.extra, kinds)


def refuse_others(shapes: dict[str, Shape], layout: Layout) -> None:
    """Vectors and buffers outside the hidden layers may stay whole; other parameters could be of any size."""
    for name, shape in shapes.items():
        if len(shape) > 1 and name not in layout.kinds and name not in layout.buffers:
            raise _cannot_narrow(
                name, f"{name!r} is neither of a convolution nor of a dense layer, and has {len(shape)} axes"
            )


def inner_shapes(full: dict[str, Shape], kinds: dict[str, Kind], ratio: float) -> dict[str, Shape]:
    """The narrower shapes of what lies between the inputs and the outputs of the network."""
    order, weights = list(full), [name for name in full if name in kinds]
    if len(weights) < 2:
        raise MethodError(
            f"there is no hidden layer to narrow: the model has {len(weights)} convolutions and dense layers that "
            "train, of which the first keeps its inputs and the last its outputs; frozen layers and parameters outside "
            "such layers do not count; take a deeper model or let more of its layers train"
        )
    first, last = weights[0], weights[-1]
    shapes: dict[str, Shape] = {}
    seen = Widths(ratio)
    for name in order[order.index(first) : order.index(last) + 1]:
        shape, owner = full[name], f"{name.rpartition('.')[0]}.weight"
        if name in kinds:
            inputs = shape[1] if name == first else seen.inputs(name, shape, kinds[name])
            shapes[name] = (shape[0] if name == last else units_kept(shape[0], ratio), inputs, *shape[2:])
            seen.add(shape[0], kinds[name])
        elif len(shape) > 1:
            raise _cannot_narrow(
                name, f"{name!r} is neither of a convolution nor of a dense layer, and has {len(shape)} axes"
            )
        elif shape:
            shapes[name] = (shapes[owner][0] if owner in kinds else seen.units(shape[0]),)
    return shapes


class Widths:
    """How wide the layers passed so far are, which tells what inputs of a given width become."""

    def __init__(self, ratio: float):
        self.ratio, self.known, self.last, self.flat = ratio, set[int](), 0, False

    def add(self, outputs: int, kind: Kind) -> None:
        self.known.add(outputs)
        self.last, self.flat = outputs, kind.name == "conv"

    def flattened(self, n: int) -> int | None:
        """What n becomes if it is the channels of the last convolution times their places."""
        places = n // self.last if self.flat and n % self.last == 0 else 0
        return units_kept(self.last, self.ratio) * places or None

    def units(self, n: int) -> int:
        """Of a norm: as wide as some layer before it, or as one that was flattened."""
        return units_kept(n, self.ratio) if n in self.known else self.flattened(n) or units_kept(n, self.ratio)

    def inputs(self, name: str, shape: Shape, kind: Kind) -> int:
        if kind.groups > 1:
            if (kind.groups, 1) != shape[:2]:
                raise _cannot_narrow(name, f"it is a convolution in {kind.groups} groups, not one for each channel")
            return 1
        if kind.name == "conv":
            return units_kept(shape[1], self.ratio)
        if (found := self.flattened(shape[1])) is not None:
            return found
        if shape[1] not in self.known:
            raise _cannot_narrow(name, f"no layer before it has the outputs that its {shape[1]} inputs could be")
        return units_kept(shape[1], self.ratio)


def _cannot_narrow(name: str, why: str) -> MethodError:
    layer = name.rpartition(".")[0] or name
    return MethodError(
        f"cannot narrow {layer!r}: {why}; what can be narrowed are chains and residual networks of convolutions, dense "
        "layers and norms, defined in the order in which they run"
    )


def narrowed_model(model: nn.Module, layout: Layout, smaller: Layout, ratio: float, scale: float = 1.0) -> nn.Module:
    """A copy of the network with the shapes of `smaller`; hidden layers divide what they give by `scale`."""
    if ratio == 1:
        return model
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in layout.shapes:
            raise _cannot_narrow(name, f"{name!r} is frozen, or a second name of another tensor")
    model = copy.deepcopy(model)
    for path, layer in model.named_modules():
        _resize_layer(layer, f"{path}." if path else "", layout, smaller, ratio)
    if scale != 1:
        for name in [name for name in smaller.shapes if name in smaller.kinds][:-1]:
            layer = model.get_submodule(name.rpartition(".")[0])
            layer.register_forward_hook(dividing(scale))
    return model


def dividing(scale: float) -> Callable[[nn.Module, tuple, Any], Any]:
    return lambda layer, x, output: output / scale


def _resize_layer(layer: nn.Module, prefix: str, layout: Layout, smaller: Layout, ratio: float) -> None:
    """Cut a layer's own tensors and set what it knows of its width, in place."""
    for name, x in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
        shape = smaller.shapes.get(prefix + name)
        if shape is not None and shape != x.shape:
            part = leading_block(x.detach()[None], shape)[0]
            setattr(layer, name, nn.Parameter(part) if isinstance(x, nn.Parameter) else part)
    weight: Tensor | None = getattr(layer, "weight", None)
    if isinstance(layer, _ConvNd | nn.Linear) and f"{prefix}weight" not in smaller.kinds:
        raise _cannot_narrow(f"{prefix}weight", f"its weight is parametrised, or that of a {type(layer).__name__}")
    if isinstance(layer, _ConvNd):
        layer.groups = smaller.kinds[f"{prefix}weight"].groups
        layer.out_channels, layer.in_channels = len(layer.weight), layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.GroupNorm):
        each = layer.num_channels // layer.num_groups
        layer.num_channels = units_kept(layer.num_channels, ratio) if weight is None else len(weight)
        layer.num_groups = layer.num_channels // math.gcd(each, layer.num_channels)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        width = (units_kept(layer.normalized_shape[0], ratio),) if weight is None else tuple(weight.shape)
        layer.normalized_shape = width if len(layer.normalized_shape) == 1 else layer.normalized_shape
    elif isinstance(layer, _NormBase):
        layer.num_features = units_kept(layer.num_features, ratio) if weight is None else len(weight)
        if f"{prefix}running_mean" not in layout.shapes:  # static: statistics that nobody learns stay at full width
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None
