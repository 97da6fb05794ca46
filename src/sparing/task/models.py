"""Small networks, registered by name. The last layer is always called `head`."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import nn

from sparing.core.errors import ConfigError, nearest

Builder = Callable[[tuple[int, ...], int], nn.Module]
"""(shape of one sample, classes) -> network."""

MODELS: dict[str, Builder] = {}


def register(name: str) -> Callable[[Builder], Builder]:
    """Make a builder known under a name.

    >>> register("linear")(lambda shape, classes: nn.Linear(shape[0], classes))  # doctest: +ELLIPSIS
    <function ...>
    >>> MODELS.pop("linear")((4,), 2).out_features
    2
    """

    def put(build: Builder) -> Builder:
        MODELS[name] = build
        return build

    return put


def network(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network registered under this name, for samples of this shape."""
    if name not in MODELS:
        raise ConfigError(f"no model is called {name!r}: {nearest(name, MODELS)}")
    return MODELS[name](shape, classes)


def mlp(inputs: int, classes: int, hidden: Sequence[int] = (64,)) -> nn.Sequential:
    """Dense layers with ReLU between them; samples of any shape are flattened.

    >>> [name for name, _ in mlp(64, 10).named_parameters()]
    ['dense1.weight', 'dense1.bias', 'head.weight', 'head.bias']
    """
    layers: list[tuple[str, nn.Module]] = [("flat", nn.Flatten())]
    for i, (a, b) in enumerate(zip([inputs, *hidden], hidden, strict=False), 1):
        layers += [(f"dense{i}", nn.Linear(a, b)), (f"relu{i}", nn.ReLU())]
    return nn.Sequential(OrderedDict([*layers, ("head", nn.Linear([inputs, *hidden][-1], classes))]))


def cnn(channels: int, classes: int, side: int) -> nn.Sequential:
    """Two 3x3 convolutions with pooling and one dense layer, for square images from 4x4 on.

    >>> sum(p.numel() for p in cnn(1, 10, side=8).parameters())
    13706
    """
    if side < 4:
        raise ConfigError(f"cnn pools twice, so images need a side of 4 or more, seen {side}: use 'mlp'")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            dense=nn.Linear(32 * (side // 4) ** 2, 64),
            relu3=nn.ReLU(),
            head=nn.Linear(64, classes),
        )
    )


@register("mlp")
def mlp_for(shape: tuple[int, ...], classes: int) -> nn.Module:
    inputs = 1
    for size in shape:
        inputs *= size
    return mlp(inputs, classes)


@register("cnn")
def cnn_for(shape: tuple[int, ...], classes: int) -> nn.Module:
    if len(shape) != 3 or shape[1] != shape[2]:
        raise ConfigError(f"cnn takes square images (channels, side, side), seen samples of shape {shape}: use 'mlp'")
    return cnn(shape[0], classes, shape[2])
