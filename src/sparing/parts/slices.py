"""Narrower client models (HeteroFL): of every hidden layer the first units only, put back in their places afterwards.

A layer of c units keeps ceil(ratio c). The inputs of the first layer and the outputs of the last stay whole, so every
tensor of a narrower network is the leading block of the full one. A width depends on the full width alone: where two
paths of a residual network meet, they fit. A dense layer after a flattened convolution keeps all places of the channels
that are left.
"""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sparing.core.capacity import by_capacity, check_ratios
from sparing.core.errors import MethodError
from sparing.core.protocols import Fit
from sparing.core.tree import Kind, Layout, Tree

Shape = tuple[int, ...]
CLOSE = 1e-3
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def slices(layout: Layout, ratios: Sequence[float], scaler: bool = True) -> Fit:
    """Client models `ratio` times as wide; ratio 1 is the model itself."""
    check_ratios("heterofl", ratios)
    layouts = tuple(narrower(layout, ratio) for ratio in ratios)

    def shape_of(name: str, size: int) -> Shape:
        shapes = layouts[size].shapes
        return shapes[name] if name in shapes else shapes[name.rpartition(".")[0]]  # beside the network: NAME.second

    def shrink(state: Tree, model: Tree, size: int) -> Tree:
        return {name: leading(x, shape_of(name, size)) for name, x in model.items()}

    def grow(resized: Tree, size: int) -> tuple[Tree, dict[str, Tensor | None]]:
        full = {name: layout.shapes[name if name in layout.shapes else name.rpartition(".")[0]] for name in resized}
        covered = {name: block(full[name], shape_of(name, size), x.device) for name, x in resized.items()}
        return {name: padded(x, full[name]) for name, x in resized.items()}, covered

    def module(model: nn.Module, size: int) -> nn.Module:
        return narrowed(model, layout, layouts[size], ratios[size], ratios[size] if scaler else 1.0)

    def check(model: nn.Module, x: Tensor) -> None:
        least = min(range(len(ratios)), key=lambda size: ratios[size])
        refuse_misplaced(model, layout, layouts[least], ratios[least], x)

    names = tuple(f"width {ratio:g}" for ratio in ratios)
    return Fit(by_capacity(ratios, "width"), layouts, shrink, grow, module, names, within=True, check=check)


def cut(units: int, ratio: float) -> int:
    """How many of so many units stay.

    >>> cut(64, 1 / 16), cut(10, 0.25), cut(3, 0.1), cut(100, 0.07)
    (4, 3, 1, 7)
    """
    return math.ceil(units * ratio - 1e-9)


def leading(x: Tensor, shape: Shape) -> Tensor:
    """The first entries along every axis: `[K, *full]` -> `[K, *shape]`."""
    return x if x.shape[1:] == shape else x[(slice(None), *(slice(n) for n in shape))].contiguous()


def padded(x: Tensor, full: Shape) -> Tensor:
    """Back to `[K, *full]`, zero where nothing was."""
    ends = [end for n, part in zip(reversed(full), reversed(x.shape[1:]), strict=True) for end in (0, n - part)]
    return x if x.shape[1:] == full else F.pad(x, ends)


def block(full: Shape, part: Shape, device: torch.device) -> Tensor | None:
    """Which entries of the full tensor a narrower network has: bool `[1, *full]`; None: all."""
    if full == part:
        return None
    return padded(torch.ones(1, *part, dtype=torch.bool, device=device), full)


def narrower(layout: Layout, ratio: float) -> Layout:
    """The layout of a network `ratio` times as wide, without what methods put beside it: they will do so again."""
    shapes = {name: shape for name, shape in layout.shapes.items() if name not in layout.extra}
    dtypes, kinds = {name: layout.dtypes[name] for name in shapes}, dict(layout.kinds)
    if ratio < 1:
        shapes |= inner_shapes(shapes, kinds, ratio)
    for name, kind in kinds.items():
        kinds[name] = kind._replace(groups=shapes[name][0]) if kind.groups > 1 and ratio < 1 else kind
    return Layout(shapes, dtypes, layout.buffers - layout.extra, kinds)


def inner_shapes(full: dict[str, Shape], kinds: dict[str, Kind], ratio: float) -> dict[str, Shape]:
    """The narrower shapes of what lies between the inputs and the outputs of the network."""
    order, weights = list(full), [name for name in full if name in kinds]
    if len(weights) < 2:
        raise MethodError(
            f"heterofl finds no hidden layer to narrow: the model has {len(weights)} convolutions and dense layers, of "
            "which the first keeps its inputs and the last its outputs; take a deeper model"
        )
    first, last = weights[0], weights[-1]
    shapes: dict[str, Shape] = {}
    seen = Widths(ratio)
    for name in order[order.index(first) : order.index(last) + 1]:
        shape, owner = full[name], f"{name.rpartition('.')[0]}.weight"
        if name in kinds:
            inputs = shape[1] if name == first else seen.inputs(name, shape, kinds[name])
            shapes[name] = (shape[0] if name == last else cut(shape[0], ratio), inputs, *shape[2:])
            seen.add(shape[0], kinds[name])
        elif len(shape) > 1:
            raise cannot(name, f"{name!r} is neither of a convolution nor of a dense layer, and has {len(shape)} axes")
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
        return cut(self.last, self.ratio) * places or None

    def units(self, n: int) -> int:
        """Of a norm: as wide as some layer before it, or as one that was flattened."""
        return cut(n, self.ratio) if n in self.known else self.flattened(n) or cut(n, self.ratio)

    def inputs(self, name: str, shape: Shape, kind: Kind) -> int:
        if kind.groups > 1:
            if (kind.groups, 1) != shape[:2]:
                raise cannot(name, f"it is a convolution in {kind.groups} groups, not one for each channel")
            return 1
        if kind.name == "conv":
            return cut(shape[1], self.ratio)
        if (found := self.flattened(shape[1])) is not None:
            return found
        if shape[1] not in self.known:
            raise cannot(name, f"no layer before it has the outputs that its {shape[1]} inputs could be")
        return cut(shape[1], self.ratio)


def cannot(name: str, why: str) -> MethodError:
    layer = name.rpartition(".")[0] or name
    return MethodError(
        f"heterofl cannot narrow {layer!r}: {why}; it takes chains and residual networks of convolutions, dense layers "
        "and norms, defined in the order in which they run"
    )


def narrowed(model: nn.Module, layout: Layout, smaller: Layout, ratio: float, scale: float = 1.0) -> nn.Module:
    """A copy of the network with the shapes of `smaller`; hidden layers divide what they give by `scale`."""
    if ratio == 1:
        return model
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name not in layout.shapes:
            raise cannot(name, f"{name!r} is frozen, or a second name of another tensor")
    model = copy.deepcopy(model)
    for path, layer in model.named_modules():
        resize(layer, f"{path}." if path else "", layout, smaller, ratio)
    if scale != 1:
        for name in [name for name in smaller.shapes if name in smaller.kinds][:-1]:
            layer = model.get_submodule(name.rpartition(".")[0])
            layer.register_forward_hook(dividing(scale))
    return model


def dividing(scale: float) -> Callable[[nn.Module, tuple, Any], Any]:
    return lambda layer, x, output: output / scale


def resize(layer: nn.Module, prefix: str, layout: Layout, smaller: Layout, ratio: float) -> None:
    """Cut a layer's own tensors and set what it knows of its width, in place."""
    for name, x in [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]:
        shape = smaller.shapes.get(prefix + name)
        if shape is not None and shape != x.shape:
            part = leading(x.detach()[None], shape)[0]
            setattr(layer, name, nn.Parameter(part) if isinstance(x, nn.Parameter) else part)
    weight: Tensor | None = getattr(layer, "weight", None)
    if isinstance(layer, _ConvNd):
        layer.groups = smaller.kinds[f"{prefix}weight"].groups
        layer.out_channels, layer.in_channels = len(layer.weight), layer.weight.shape[1] * layer.groups
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, nn.GroupNorm):
        each = layer.num_channels // layer.num_groups
        layer.num_channels = cut(layer.num_channels, ratio) if weight is None else len(weight)
        layer.num_groups = layer.num_channels // math.gcd(each, layer.num_channels)
    elif isinstance(layer, nn.LayerNorm | nn.RMSNorm):
        width = (cut(layer.normalized_shape[0], ratio),) if weight is None else tuple(weight.shape)
        layer.normalized_shape = width if len(layer.normalized_shape) == 1 else layer.normalized_shape
    elif isinstance(layer, _NormBase):
        layer.num_features = cut(layer.num_features, ratio) if weight is None else len(weight)
        if f"{prefix}running_mean" not in layout.shapes:  # static: statistics that nobody learns stay at full width
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = layer.num_batches_tracked = None


def refuse_misplaced(model: nn.Module, layout: Layout, smaller: Layout, ratio: float, x: Tensor) -> None:
    """The narrower network must be the full one with zeros in all other places, norms and scales aside.

    This is not so where units are counted in another order than that of the layer they come from: after a
    concatenation, say, or in the heads of attention.
    """
    if ratio == 1:
        return
    thin = narrowed(model, layout, smaller, ratio)
    g = torch.Generator().manual_seed(0)
    some = {name: torch.randn(s, generator=g) / math.prod(s[1:]) ** 0.5 for name, s in smaller.shapes.items()}
    whole = {name: padded(w[None], layout.shapes[name])[0] for name, w in some.items()}
    outputs = []
    for net, values in ((thin, some), (model, whole)):
        bare = without_norms(net).eval()
        bare.load_state_dict({name: values.get(name, w) for name, w in bare.state_dict().items()})
        with torch.no_grad():
            outputs.append(bare(x))
    a, b = outputs
    if a.shape != b.shape or not bool((a - b).abs().max() <= CLOSE * b.abs().max()):
        raise MethodError(
            f"heterofl cannot narrow this model: at ratio {ratio:g} its first units do something else than in the full "
            "network; it takes chains and residual networks whose units keep their order (no concatenation, no "
            "attention, no mean over channels)"
        )


def without_norms(model: nn.Module) -> nn.Module:
    """A copy in which norms do nothing: their statistics may depend on the width."""
    model = copy.deepcopy(model)
    for path, layer in list(model.named_modules()):
        if isinstance(layer, NORMS) and path:
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Identity())
    return model
