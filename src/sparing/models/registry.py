"""From the name of a network in a study to the network."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from sparing.core.errors import ConfigError
from sparing.data.options import name_and_options, unknown_model, validate_options
from sparing.models.adapter import with_adapter

ModelBuilder = Callable[..., nn.Module]
"""(shape of one sample, classes, options of its own) -> network. For tokens, classes is the size of the vocabulary."""

MODELS: dict[str, ModelBuilder] = {}


def register_model(name: str) -> Callable[[ModelBuilder], ModelBuilder]:
    """Make a builder known under a name.

    >>> register_model("linear")(lambda shape, classes: nn.Linear(shape[0], classes))  # doctest: +ELLIPSIS
    <function ...>
    >>> MODELS.pop("linear")((4,), 2).out_features
    2
    """

    def put(build: ModelBuilder) -> ModelBuilder:
        MODELS[name] = build
        return build

    return put


def build_network(name: str | Mapping[str, Any], shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """The network of this name for samples of this shape; `{"mlp": {"hidden": [200]}}` carries its own options.

    Every network that is a chain of layers takes `adapter`, the width of a small layer before the head.

    >>> build_network("mlp", (1, 28, 28), 10, hidden=[200, 200]).head
    Linear(in_features=200, out_features=10, bias=True)
    """
    name, own = name_and_options("model", name)
    if name not in MODELS:
        raise unknown_model(name, MODELS)
    own = own | options
    width = own.pop("adapter", None)
    model = MODELS[name](shape, classes, **validate_options("model", name, MODELS[name], own, given=2))
    return model if width is None else with_adapter(name, model, width)


def image_size(name: str, shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """(channels, height, width) of samples that this network can take; others are refused."""
    if len(shape) != 3:
        raise ConfigError(
            f"{name} takes images (channels, height, width), seen samples of shape {shape}: use 'mlp', or 'lstm' or "
            "'transformer' for tokens"
        )
    if min(shape[1:]) < least:
        raise ConfigError(f"{name} needs images of {least}x{least} or more, seen {shape[1]}x{shape[2]}: use 'cnn'")
    return shape[0], shape[1], shape[2]
