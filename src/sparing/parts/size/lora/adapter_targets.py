"""Which layers of a network get an adapter, and which train whole beside them."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from sparing.core.errors import MethodError, nearest_name
from sparing.parts.size.lora.adapted import CONVOLUTIONS


def target_paths(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Dense layers and convolutions whose path holds one of these as whole components."""
    layers = [path for path, layer in model.named_modules() if isinstance(layer, (nn.Linear, *CONVOLUTIONS)) and path]
    if not targets:
        raise MethodError("lora.targets is empty; name at least one layer, such as [q_proj, v_proj]")
    found: set[str] = set()
    for word in targets:
        hits = {path for path in layers if f".{word}." in f".{path}."}
        if not hits:
            words = {part for path in layers for part in path.split(".")} | set(layers)
            raise MethodError(
                f"lora.targets: {word!r} matches no dense layer or convolution; {nearest_name(word, words)}"
            )
        found |= hits
    return [path for path in layers if path in found]


def matching_parameters(model: nn.Module, full: Sequence[str]) -> set[str]:
    """Of the layers named in `full`."""
    found: set[str] = set()
    names = [name for name, _ in model.named_parameters()]
    for word in full:
        hits = {name for name in names if f".{word}." in f".{name}."}
        if not hits:
            layers = {name.rpartition(".")[0] for name in names}
            raise MethodError(f"lora.full: {word!r} matches no layer; {nearest_name(word, layers)}")
        found |= hits
    return found


def least_side(path: str, layer: nn.Module) -> int:
    """The rank that the layer's weight, as a matrix, can have."""
    if getattr(layer, "groups", 1) > 1:
        raise MethodError(f"lora cannot adapt {path!r}, a convolution in groups; take it out of lora.targets")
    weight: Any = layer.weight
    return min(weight.shape[0], weight[0].numel())


def replace_layer(model: nn.Module, path: str, layer: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(owner), leaf, layer)
