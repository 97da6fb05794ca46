"""Networks that peft has wrapped, known by their structure: its LoRA layers are taken over, the network stays without.

A LoRA layer of peft holds `base_layer`, and by the name of the adapter `lora_A`, `lora_B`, `lora_dropout`, `scaling`. A
layer that peft trains whole (`modules_to_save`) stands in a wrapper beside the one it began as. peft is not imported.

    >>> is_wrapped(nn.Sequential(nn.Linear(2, 2)))
    False
"""

import copy
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparing.core.errors import MethodError
from sparing.parts.size.lora.adapted import CONVOLUTIONS
from sparing.parts.size.lora.adapter_targets import matching_parameters, replace_layer, target_paths

_INSTEAD = "unload it (`model.unload()`), or drop lora from the list, and peft's adapters train and are averaged"


class TakenLayer(NamedTuple):
    a: Tensor
    b: Tensor
    scale: float
    drop: nn.Module | None  # what peft leaves out at random of the adapter's inputs


class Unwrapped(NamedTuple):
    network: nn.Module
    layers: dict[str, TakenLayer]


def is_wrapped(model: nn.Module) -> bool:
    return hasattr(model, "peft_config") or any(map(_is_tuned, model.modules()))


def unwrapped(model: nn.Module, targets: Sequence[str] | None, full: Sequence[str]) -> Unwrapped:
    """A copy of the network within, and its adapters; `targets` must be theirs, where any are named."""
    _refuse_other_kinds(model)
    model = _inner(copy.deepcopy(model))
    layers: dict[str, TakenLayer] = {}
    trained = {id(x) for x in model.parameters() if x.requires_grad}
    for path, layer in list(model.named_modules()):
        if _is_tuned(layer):
            layers[path] = _taken_layer(path, layer)
            replace_layer(model, path, layer.base_layer)  # pyright: ignore[reportArgumentType]
        elif {"original_module", "modules_to_save"} <= layer._modules.keys():
            replace_layer(model, path, _only_one(path, layer.modules_to_save))
    _refuse_unfrozen(model, trained, full)
    if targets is not None and set(found := target_paths(model, targets)) != set(layers):
        odd = sorted(set(found) ^ set(layers))[0]
        raise MethodError(
            f"lora.targets is {list(targets)}, but peft has wrapped other layers: {odd!r} is in one of them only; drop "
            "lora.targets, and those of peft are meant"
        )
    return Unwrapped(model, layers)


def refuse_other_size(layers: dict[str, TakenLayer], rank: int, scale: float) -> None:
    """The options must say what the wrapped network says."""
    for path, taken in layers.items():
        if len(taken.a) != rank:
            raise MethodError(
                f"lora.rank, or the largest of lora.ranks, is {rank}, but peft has wrapped {path!r} at rank "
                f"{len(taken.a)}; write that, the same for all layers"
            )
        if abs(taken.scale - scale) > 1e-9 * scale:
            raise MethodError(
                f"lora.alpha and lora.scale make a scale of {scale:g}, but peft's adapter of {path!r} has "
                f"{taken.scale:g}; write alpha: {taken.scale * rank:g}, or scale: root where peft has use_rslora"
            )


def _is_tuned(layer: nn.Module) -> bool:
    of_peft = hasattr(layer, "adapter_layer_names") and "base_layer" in layer._modules
    return of_peft or "lora_A" in layer._modules


def _inner(model: nn.Module) -> nn.Module:
    """Without the two modules that peft puts around the whole."""
    tuner = model._modules.get("base_model") if hasattr(model, "peft_config") else None
    network = None if tuner is None else tuner._modules.get("model")
    return model if network is None else network


def _refuse_other_kinds(model: nn.Module) -> None:
    for config in getattr(model, "peft_config", {}).values():
        kind = getattr(config, "peft_type", "LORA")
        kind = str(getattr(kind, "value", kind))
        if kind != "LORA":
            raise MethodError(f"peft has wrapped the network by {kind}, and lora takes over LoRA only; {_INSTEAD}")


def _only_one(path: str, found: Any) -> Any:
    """Of a layer's adapters by name."""
    if len(found) != 1:
        names = ", ".join(found) or "none"
        raise MethodError(f"peft has {path!r} with adapters by the names {names}; leave one (`model.delete_adapter`)")
    return next(iter(found.values()))


def _taken_layer(path: str, layer: Any) -> TakenLayer:
    kind = next(iter(getattr(layer, "adapter_layer_names", ())), "of an older version")
    if not {"base_layer", "lora_A", "lora_B"} <= layer._modules.keys():
        raise MethodError(f"peft has wrapped {path!r} with an adapter of another kind ({kind}); {_INSTEAD}")
    if len(getattr(layer, "lora_embedding_A", ())):
        raise MethodError(f"peft has wrapped {path!r}, an embedding, which lora cannot take over; {_INSTEAD}")
    a, b = _only_one(path, layer.lora_A), _only_one(path, layer.lora_B)
    (name,), base = layer.lora_A, layer.base_layer
    known = isinstance(base, (nn.Linear, *CONVOLUTIONS)) and type(a) is type(b)
    odd = {
        "DoRA": bool(len(getattr(layer, "lora_magnitude_vector", ()))) or _said(layer, "use_dora", name, False),
        "a bias in lora_B": getattr(b, "bias", None) is not None,
        f"a layer of type {type(base).__name__}": not known,
        "a variant of LoRA": name in getattr(layer, "lora_variant", ()),
        "an adapter merged into its base": bool(getattr(layer, "merged_adapters", ())),
        "a dilated convolution": isinstance(base, CONVOLUTIONS) and set(base.dilation) != {1},
        "padding other than zeros": isinstance(base, CONVOLUTIONS) and base.padding_mode != "zeros",
    }
    for what, seen in odd.items():
        if seen:
            raise MethodError(f"peft has wrapped {path!r} with {what}, which lora cannot take over; {_INSTEAD}")
    drop = _said(layer, "lora_dropout", name, None)
    drop = drop if getattr(drop, "p", 0) else None
    return TakenLayer(a.weight, b.weight, float(_said(layer, "scaling", name, 1.0)), drop)


def _said(layer: Any, what: str, name: str, otherwise: Any) -> Any:
    """What peft has noted of the adapter of this name."""
    return dict(getattr(layer, what, {}).items()).get(name, otherwise)


def _refuse_unfrozen(model: nn.Module, trained: Collection[int], full: Sequence[str]) -> None:
    """peft may train more than adapters: what lora is to train whole must be named."""
    whole = matching_parameters(model, full)
    for name, x in model.named_parameters():
        if id(x) in trained and name not in whole:
            raise MethodError(
                f"lora: {name!r} of the network that peft has wrapped is not frozen; let it not require gradients, or "
                f"name {name.rpartition('.')[0]!r} in lora.full"
            )
