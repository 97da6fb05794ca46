"""A layer with an adapter: the frozen layer as it was, and beside it two thin ones that train.

    output = base(x) + scale * B(A(x))

A has the frozen layer's inputs and r outputs, B has r inputs and its outputs. Of a convolution, A is one of the same
kernel and stride, B one of kernel 1, so the adapter stands for the weight scale * B A, A read as r x (n kh kw).

    >>> layer = Adapted(nn.Linear(4, 3), AdapterSettings(rank=2, scale=0.5), "head")
    >>> [name for name, x in layer.named_parameters() if x.requires_grad]
    ['lora_a.weight', 'lora_b.weight']
    >>> bool((layer(torch.ones(1, 4)) == layer.base(torch.ones(1, 4))).all())
    True
"""

import copy
import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparing.core.keys import client_keys, hashes, tag_word, uniforms
from sparing.parts.factors import ADAPTER_ENDS

(B, A), MERGED = ADAPTER_ENDS, "merged.weight"
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Shape = tuple[int, ...]


class AdapterSettings(NamedTuple):
    rank: int
    scale: float
    trains_a: bool = True
    seed: int = 0
    merges: bool = False  # whether the server may add to the frozen layer, beside it
    anew: bool = False  # whether every round starts from a B of zero


class Adapted(nn.Module):
    def __init__(self, layer: nn.Module, settings: AdapterSettings, path: str):
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.rank, self.scale = settings.rank, settings.scale
        self.axis, self.lora_a, self.lora_b = _thin_layers(layer, settings.rank)
        rows = keyed_rows(path, settings.seed, 0, settings.rank, tuple(self.lora_a.weight.shape[1:]))
        self.lora_a.weight = nn.Parameter(rows.to(self.lora_a.weight), requires_grad=settings.trains_a)
        self.lora_b.weight = nn.Parameter(torch.zeros_like(self.lora_b.weight))
        self.merged = _layer_of_zeros(layer) if settings.merges else None
        self.drop: nn.Module | None = None  # what is left out at random of the adapter's inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.base(x)
        if self.merged is not None:
            out = out + self.merged(x.to(self.merged.weight.dtype)).to(out.dtype)
        if not self.rank:
            return out + (self.lora_a.weight[:0].sum() + self.lora_b.weight.sum())  # zero, with gradients
        seen = x if self.drop is None else self.drop(x)
        thin = self.lora_a(seen.to(self.lora_a.weight.dtype))
        thin = thin if thin.shape[self.axis] == self.rank else thin.narrow(self.axis, 0, self.rank)
        return out + (self.scale * self.lora_b(thin)).to(out.dtype)

    @property
    def weight(self) -> Tensor:
        """What the layer amounts to, for whoever reads a weight instead of calling the layer, as attention may."""
        base: Any = self.base.weight
        product = self.lora_b.weight.flatten(1) @ self.lora_a.weight[: self.rank].flatten(1)
        added = (self.scale * product).reshape(base.shape)
        return base + (added if self.merged is None else added + self.merged.weight).to(base.dtype)

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias  # type: ignore[return-value]


def _thin_layers(layer: nn.Module, rank: int) -> tuple[int, Any, Any]:
    """The axis of a layer's outputs, and the two layers of its adapter, not filled yet."""
    weight: Any = layer.weight
    kind = {"dtype": weight.dtype if weight.dtype.itemsize > 2 else torch.float32, "device": weight.device}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        if isinstance(layer, nn.Linear):
            b = _empty_layer(nn.Linear, rank, layer.out_features, **kind)
            return -1, _layer_of_shape(layer, rank, **kind), b
        assert isinstance(layer, CONVOLUTIONS)
        b = _empty_layer(_kind_of_convolution(layer), rank, layer.out_channels, 1, **kind)
        return -1 - len(layer.kernel_size), _layer_of_shape(layer, rank, **kind), b


def _layer_of_shape(layer: nn.Module, outputs: int, **kind: Any) -> Any:
    """One like it with so many outputs, no bias, and not filled yet."""
    if isinstance(layer, nn.Linear):
        return _empty_layer(nn.Linear, layer.in_features, outputs, **kind)
    assert isinstance(layer, CONVOLUTIONS)
    along: Any = {name: getattr(layer, name) for name in ("stride", "padding", "dilation", "padding_mode")}
    return _empty_layer(_kind_of_convolution(layer), layer.in_channels, outputs, layer.kernel_size, **along, **kind)


def _layer_of_zeros(layer: nn.Module) -> Any:
    """One like it, in float32 and frozen, that adds nothing yet."""
    weight: Any = layer.weight
    zeros = _layer_of_shape(layer, len(weight), dtype=torch.float32, device=weight.device)
    zeros.weight = nn.Parameter(torch.zeros_like(zeros.weight), requires_grad=False)
    return zeros


def _empty_layer(*args: Any, **options: Any) -> Any:
    return torch.nn.utils.skip_init(*args, bias=False, **options)


def _kind_of_convolution(layer: nn.Module) -> Any:
    return next(one for one in CONVOLUTIONS if isinstance(layer, one))


def keyed_rows(path: str, seed: int, round: int, rank: int, shape: Shape) -> Tensor:
    """Rows of A, `[rank, *shape]`, uniform within 1 / sqrt(inputs): row i is the same whatever the rank."""
    inputs = math.prod(shape)
    keys = client_keys(np.arange(rank), tag_word(seed, round, f"lora/{path}"))[0]
    drawn = uniforms(hashes(torch.from_numpy(keys.view(np.int64)), inputs))
    return ((2 * drawn - 1) / math.sqrt(inputs)).reshape(rank, *shape)


def model_of_rank(model: nn.Module, rank: int, scale: float) -> nn.Module:
    """A copy of an adapted network at a lower rank; what is frozen is held once for all."""
    frozen = {id(x): x for x in model.parameters() if not x.requires_grad}
    model = copy.deepcopy(model, dict(frozen))
    for layer in model.modules():
        if isinstance(layer, Adapted):
            a, b = layer.lora_a.weight, layer.lora_b.weight
            _, thin_a, thin_b = _thin_layers(layer.base, rank)
            thin_a.weight = nn.Parameter(a[:rank].detach().clone()) if a.requires_grad else a
            thin_b.weight = nn.Parameter(b[:, :rank].detach().clone())
            layer.rank, layer.scale, layer.lora_a, layer.lora_b = rank, scale, thin_a, thin_b
    return model
