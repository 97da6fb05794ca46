"""Adapters in the form in which peft keeps them, and merged into their base: tensors by name, and peft's config.

peft finds layers by the ends of their paths; where that would find others too, the config has a pattern for all of the
path, and a layer that trains whole is refused. Layers that peft would run in another way are refused as well.

    >>> from sparing.parts.size.lora.adapted import AdapterSettings
    >>> layer = Adapted(nn.Linear(4, 3), AdapterSettings(rank=2, scale=0.5), "head")
    >>> form = peft_form(nn.ModuleDict({"head": layer}))
    >>> list(form.tensors), form.config["lora_alpha"]
    (['base_model.model.head.lora_A.weight', 'base_model.model.head.lora_B.weight'], 1)
"""

import math
import re
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.core.errors import MethodError
from sparing.parts.size.lora.adapted import CONVOLUTIONS, Adapted
from sparing.parts.size.lora.ranks import factor_side

_PREFIX = "base_model.model."
_INSTEAD = "write the merged network instead"
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


class PeftForm(NamedTuple):
    tensors: dict[str, Tensor]  # adapter_model.safetensors
    config: dict[str, Any]  # adapter_config.json


def adapted_layers(network: nn.Module) -> dict[str, Adapted]:
    return {path: layer for path, layer in network.named_modules() if isinstance(layer, Adapted)}


def peft_form(network: nn.Module, moved: Collection[str] = (), root: bool = False) -> PeftForm:
    """`moved`: buffers that are not as in the base. `root`: the scale is alpha / sqrt(r), peft's `use_rslora`."""
    layers = adapted_layers(network)
    for path, layer in layers.items():
        _refuse_other_forward(network, path, layer)
    whole = _whole_layers(network, moved, layers)
    tensors = {}
    for path, layer in layers.items():
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = layer.lora_a.weight[: layer.rank]
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = layer.lora_b.weight
    for path in whole:
        tensors |= {f"{_PREFIX}{path}.{name}": x for name, x in network.get_submodule(path).state_dict().items()}
    return PeftForm(_copies(tensors), _config(_base_paths(network, layers), layers, whole, root))


def merged_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The state of the base with scale * B A added to its layers, in float64 and rounded once."""
    layers = adapted_layers(network)
    _refuse_tied(network, {f"{path}.base.weight": f"{path!r} shares its weight" for path in layers})
    tensors = {}
    for name, x in network.state_dict().items():
        path = next((path for path in layers if name.startswith(f"{path}.")), None)
        if path is None:
            tensors[name] = x
        elif name == f"{path}.base.weight":
            tensors[f"{path}.weight"] = _merged_weight(layers[path])
        elif name.startswith(f"{path}.base."):
            tensors[f"{path}.{name.removeprefix(f'{path}.base.')}"] = x
    return _copies(tensors)


def _merged_weight(layer: Adapted) -> Tensor:
    base: Any = layer.base.weight
    product = layer.lora_b.weight.double().flatten(1) @ layer.lora_a.weight[: layer.rank].double().flatten(1)
    added = (layer.scale * product).reshape(base.shape)
    if layer.merged is not None:
        added = added + layer.merged.weight.double()
    return (base.double() + added).to(base.dtype)


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, none sharing memory with another, as safetensors needs them."""
    return {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}


def _config(paths: list[str], layers: dict[str, Adapted], whole: list[str], root: bool) -> dict[str, Any]:
    sizes = {path: (layer.rank, _alpha(layer, root)) for path, layer in layers.items()}
    rank, alpha = Counter(sizes.values()).most_common(1)[0][0]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": _target_modules(paths, layers),
        "rank_pattern": {f"^{re.escape(path)}": r for path, (r, _) in sizes.items() if r != rank},
        "alpha_pattern": {f"^{re.escape(path)}": a for path, (_, a) in sizes.items() if a != alpha},
        "modules_to_save": whole or None,
        "use_rslora": root,
        "use_dora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _alpha(layer: Adapted, root: bool) -> float:
    """What peft makes our scale of; whole numbers as such."""
    alpha = float(f"{layer.scale * (math.sqrt(layer.rank) if root else layer.rank):.12g}")
    return int(alpha) if alpha.is_integer() else alpha


def _target_modules(paths: list[str], layers: dict[str, Adapted]) -> list[str] | str:
    """Full paths, or one pattern for them where another layer's path ends in one."""
    if any(other.endswith(f".{path}") for path in layers for other in paths if other not in layers):
        return "|".join(map(re.escape, layers))
    return list(layers)


def _base_paths(network: nn.Module, layers: dict[str, Adapted]) -> list[str]:
    inside = tuple(f"{path}." for path in layers)
    return [path for path, _ in network.named_modules() if path and not path.startswith(inside)]


def _refuse_other_forward(network: nn.Module, path: str, layer: Adapted) -> None:
    """A layer that peft would not run as it runs here."""
    owner, base = network.get_submodule(path.rpartition(".")[0]), layer.base
    if not layer.rank:
        raise MethodError(
            f"an adapter of rank 0, as that of {path!r}, has nothing to write; choose a rank of at least 1"
        )
    if layer.merged is not None and bool(layer.merged.weight.any()):
        raise MethodError(
            f"what was merged into the base of {path!r} during training is no adapter, and peft's would lack it; "
            f"{_INSTEAD}"
        )
    if isinstance(owner, nn.MultiheadAttention):
        raise MethodError(
            f"{path!r} belongs to an nn.MultiheadAttention, which reads its weight and so passes peft's adapter by; "
            f"{_INSTEAD}"
        )
    if isinstance(base, CONVOLUTIONS) and (set(base.dilation) != {1} or base.padding_mode != "zeros"):
        raise MethodError(
            f"{path!r} has dilation {base.dilation} and padding {base.padding_mode}, and peft's adapters of "
            f"convolutions have neither dilation nor padding other than zeros; {_INSTEAD}"
        )


def _whole_layers(network: nn.Module, moved: Collection[str], layers: dict[str, Adapted]) -> list[str]:
    """Paths of the layers that peft is to save as they are: what trained whole beside adapters, and moved buffers."""
    names = [name for name, x in network.named_parameters() if x.requires_grad and not factor_side(name)]
    names += [name for name, _ in network.named_buffers() if name in moved]
    owners = sorted({name.rpartition(".")[0]: name for name in names}.items())
    paths, found = [f"{_PREFIX}{path}" for path in _base_paths(network, layers)], []
    for path, name in owners:
        if any(path.startswith(f"{outer}.") for outer in found):
            continue
        within = [one for one in layers if not path or one.startswith(f"{path}.")]
        if not path or within or isinstance(network.get_submodule(path), _LISTS):
            where = f"belongs to {path!r}" if path else "belongs to the network itself"
            raise MethodError(
                f"{name!r} changed in training and {where}, beside other layers, but peft saves whole layers; "
                f"{_INSTEAD}"
            )
        other = next((one for one in paths if one != f"{_PREFIX}{path}" and one.endswith(path)), None)
        other = other or next((one for one in layers if re.match(rf"(.*\.)?{path}(\..*)?$", one)), None)
        if other or f"{_PREFIX}".rstrip(".").endswith(path):
            raise MethodError(
                f"{path!r} trained whole, but by that name peft would also find {(other or 'the network itself')!r}; "
                f"{_INSTEAD}"
            )
        found.append(path)
    parameters = {name for name, _ in network.named_parameters() if name.startswith(tuple(f"{one}." for one in found))}
    _refuse_tied(network, {name: f"{name!r} trained whole and is shared" for name in parameters})
    return found


def _refuse_tied(network: nn.Module, said: dict[str, str]) -> None:
    """Tensors that would change under another name too."""
    every = dict(network.named_parameters(remove_duplicate=False))
    for name, words in said.items():
        other = next((one for one, x in every.items() if x is every[name] and one != name), None)
        if other:
            raise MethodError(f"{words} with {other!r}, which must not change with it; untie them before training")
