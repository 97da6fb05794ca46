"""Narrower client models (HeteroFL): the first units of every hidden layer, put back in their places afterwards."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sparing.core.context import Ctx
from sparing.core.errors import MethodError
from sparing.core.method import Fit, Remembered, Resize
from sparing.core.tree import Layout, Tree
from sparing.parts.size.capacity import by_capacity, refuse_ratios
from sparing.parts.size.widths import Shape, leading_block, narrowed_model, narrower_layout

CLOSE = 1e-3
NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def width_slices_fit(layout: Layout, ratios: Sequence[float], scaler: bool = True) -> Fit:
    """Client models `ratio` times as wide; ratio 1 is the model itself."""
    refuse_ratios("heterofl", ratios)
    layouts = tuple(narrower_layout(layout, ratio) for ratio in ratios)

    def shape_of(name: str, size: int) -> Shape:
        shapes = layouts[size].shapes
        return shapes[name] if name in shapes else shapes[name.rpartition(".")[0]]  # beside the network: NAME.second

    def shrink(state: Remembered, model: Tree, size: int, ctx: Ctx) -> Tree:
        return {name: leading_block(x, shape_of(name, size)) for name, x in model.items()}

    def grow(resized: Tree, size: int, ctx: Ctx) -> tuple[Tree, dict[str, Tensor | None]]:
        full = {name: layout.shapes[name if name in layout.shapes else name.rpartition(".")[0]] for name in resized}
        covered = {name: _covered_block(full[name], shape_of(name, size), x.device) for name, x in resized.items()}
        return {name: _padded_to_full(x, full[name]) for name, x in resized.items()}, covered

    def module(model: nn.Module, size: int) -> nn.Module:
        return narrowed_model(model, layout, layouts[size], ratios[size], ratios[size] if scaler else 1.0)

    def check(model: nn.Module, x: Any) -> None:
        if not isinstance(x, Tensor):
            raise MethodError("heterofl narrows networks whose samples are one tensor, seen several: take another part")
        least = min(range(len(ratios)), key=lambda size: ratios[size])
        refuse_misplaced(model, layout, layouts[least], ratios[least], x)

    names = tuple(f"width {ratio:g}" for ratio in ratios)
    return Fit(by_capacity(ratios, "width"), layouts, Resize(shrink, grow), module, names, within=True, check=check)


def _padded_to_full(x: Tensor, full: Shape) -> Tensor:
    """Back to `[K, *full]`, zero where nothing was."""
    ends = [end for n, part in zip(reversed(full), reversed(x.shape[1:]), strict=True) for end in (0, n - part)]
    return x if x.shape[1:] == full else F.pad(x, ends)


def _covered_block(full: Shape, part: Shape, device: torch.device) -> Tensor | None:
    """Which entries of the full tensor a narrower network has: bool `[1, *full]`; None: all."""
    if full == part:
        return None
    return _padded_to_full(torch.ones(1, *part, dtype=torch.bool, device=device), full)


def refuse_misplaced(model: nn.Module, layout: Layout, smaller: Layout, ratio: float, x: Tensor) -> None:
    """The narrower network must be the full one with zeros in all other places, norms and scales aside.

    This is not so where units are counted in another order than that of the layer they come from: after a
    concatenation, say, or in the heads of attention.
    """
    if ratio == 1:
        return
    thin = narrowed_model(model, layout, smaller, ratio)
    g = torch.Generator().manual_seed(0)
    some = {name: torch.randn(s, generator=g) / math.prod(s[1:]) ** 0.5 for name, s in smaller.shapes.items()}
    whole = {name: _padded_to_full(w[None], layout.shapes[name])[0] for name, w in some.items()}
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
