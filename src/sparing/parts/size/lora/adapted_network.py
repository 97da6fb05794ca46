"""A network with adapters: all of it frozen but these and the layers that train whole."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from sparing.core.errors import MethodError
from sparing.core.tree import bases_in
from sparing.parts.size.lora.adapted import Adapted, AdapterSettings
from sparing.parts.size.lora.adapter_targets import least_side, matching_parameters, replace_layer, target_paths
from sparing.parts.size.lora.wrapped import TakenLayer, is_wrapped, refuse_other_size, unwrapped

USUAL_TARGETS = ("q_proj", "v_proj")


def adapted_model(
    model: nn.Module, targets: Sequence[str] | None, full: Sequence[str], settings: AdapterSettings, keep: int
) -> nn.Module:
    """A copy of the network with adapters on the targets; those that peft has put there go on from what they hold.

    Adapters have the settings' rank, or the rank `keep` where that is more, as far as the layer has it.
    """
    if bases_in(model) or any(isinstance(layer, Adapted) for layer in model.modules()):
        raise MethodError("lora finds a network that another recipe has remade already; keep one of them")
    taken: dict[str, TakenLayer] = {}
    if is_wrapped(model):
        model, taken = unwrapped(model, targets, full)
        refuse_other_size(taken, settings.rank, settings.scale)
        paths = list(taken)
    else:
        model, paths = copy.deepcopy(model), target_paths(model, USUAL_TARGETS if targets is None else targets)
    whole = matching_parameters(model, full)
    both = next((path for path in paths if any(name.startswith(f"{path}.") for name in whole)), None)
    if both is not None:
        raise MethodError(
            f"lora: {both!r} is of lora.full and of lora.targets; name it in one: whole, or with an adapter"
        )
    for name, x in model.named_parameters():
        x.requires_grad_(name in whole)
    for path in paths:
        layer, rank = model.get_submodule(path), settings.rank
        least = least_side(path, layer)
        if rank > least:
            raise MethodError(
                f"lora: rank {rank} is above that of {path!r}, which is {least}; lower lora.rank or lora.ranks, or "
                "take it out of lora.targets"
            )
        adapted = Adapted(layer, settings._replace(rank=min(max(rank, keep), least)), path)
        if path in taken:
            _go_on_from(adapted, path, taken[path], settings)
        replace_layer(model, path, adapted)
    return model


@torch.no_grad()
def _go_on_from(adapted: Adapted, path: str, taken: TakenLayer, settings: AdapterSettings) -> None:
    """The adapter as peft holds it, in the first rows and columns."""
    if settings.anew and bool(taken.b.any()):
        raise MethodError(
            f"lora.blend 'stack' starts adapters anew each round, but what peft has put on {path!r} is trained "
            "already; merge it into the network first (`model.merge_and_unload()`), or set lora.blend to another"
        )
    adapted.lora_a.weight[: len(taken.a)] = taken.a
    adapted.lora_b.weight[:, : len(taken.a)] = taken.b
    adapted.drop = taken.drop
