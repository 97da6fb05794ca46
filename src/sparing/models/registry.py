"""From the name of a network in a study to the network."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from sparing.core.errors import ConfigError
from sparing.data.options import name_and_options, unknown_model, validate_options
from sparing.models.adapter import with_adapter

ModelBuilder = Callable[..., nn.Module]
"""(shape of one sample, classes, options of its own) -> network. Where targets are tokens, classes is how many tokens
there are. One called `name:FOLDER` is given the folder first; options `vocabulary` (how many tokens samples are made
of) and `per_token` (whether there is a target at every place) are filled in from the data, where a builder has them."""

MODELS: dict[str, ModelBuilder] = {}


def register_model(name: str) -> Callable[[ModelBuilder], ModelBuilder]:
    """Make a builder known under a name.

    >>> register_model("linear")(lambda shape, classes: nn.Linear(shape[0], classes))  # doctest: +ELLIPSIS
    <function ...>
    >>> MODELS.pop("linear")((4,), 2).out_features
    2
    """

    def put(build: ModelBuilder) -> ModelBuilder:
        MODELS[name.partition(":")[0]] = build
        return build

    return put


def build_network(
    name: str | Mapping[str, Any],
    shape: tuple[int, ...],
    classes: int,
    offered: Mapping[str, Any] = {},
    **options: Any,
) -> nn.Module:
    """The network of this name for samples of this shape; `{"mlp": {"hidden": [200]}}` carries its own options.

    Every network that is a chain of layers takes `adapter`, the width of a small layer before the head. `offered`: what
    is known of the data, for builders that take it.

    >>> build_network("mlp", (1, 28, 28), 10, hidden=[200, 200]).head
    Linear(in_features=200, out_features=10, bias=True)
    """
    name, own = name_and_options("model", name)
    head, colon, place = name.partition(":")
    if head not in MODELS:
        raise unknown_model(name, MODELS)
    build, own = MODELS[head], own | options
    takes = inspect.signature(build).parameters
    if ("folder" in takes) != bool(place):
        raise ConfigError(f"model is {name!r}: " + (f"write {head}:FOLDER" if not colon else f"write {head} alone"))
    given = (place, shape, classes) if place else (shape, classes)
    own = {key: one for key, one in offered.items() if key in takes and one is not None} | own
    width = own.pop("adapter", None)
    model = build(*given, **validate_options("model", head, build, own, len(given)))
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
