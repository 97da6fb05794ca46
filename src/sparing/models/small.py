"""Small networks: dense layers, and two convolutions in three sizes."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from pydantic import PositiveInt
from torch import nn

from sparing.core.errors import ConfigError
from sparing.models.registry import image_size, register_model


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


@register_model("mlp")
def _mlp_for_shape(shape: tuple[int, ...], classes: int, hidden: Sequence[PositiveInt] = (64,)) -> nn.Module:
    return mlp(math.prod(shape), classes, hidden)


@register_model("cnn")
def _cnn_for_shape(shape: tuple[int, ...], classes: int) -> nn.Module:
    if image_size("cnn", shape)[1] != shape[2]:
        raise ConfigError(f"cnn takes square images (channels, side, side), seen samples of shape {shape}: use 'mlp'")
    return cnn(shape[0], classes, shape[2])


@register_model("fedavg-cnn")
def fedavg_cnn(shape: tuple[int, ...], classes: int, padding: Literal[0, 2] = 2) -> nn.Sequential:
    """The CNN of the FedAvg paper: two 5x5 convolutions that keep the size, each pooled, and a dense layer of 512.

    With `padding` 0 they do not keep it, as in PFLlib.

    >>> sum(p.numel() for p in fedavg_cnn((1, 28, 28), 10).parameters())
    1663370
    """
    channels, *sides = image_size("fedavg-cnn", shape, least=4 if padding else 16)
    height, width = (((side - 4 + 2 * padding) // 2 - 4 + 2 * padding) // 2 for side in sides)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5, padding=padding),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5, padding=padding),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            dense=nn.Linear(64 * height * width, 512),
            relu3=nn.ReLU(),
            head=nn.Linear(512, classes),
        )
    )


@register_model("lenet5")
def lenet5(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """LeNet-5 as it is trained today, with ReLU and max pooling; images smaller than 32 are padded by 2 all round.

    >>> sum(p.numel() for p in lenet5((1, 28, 28), 10).parameters())
    61706
    """
    channels, *sides = image_size("lenet5", shape, least=12)
    padding = 2 if min(sides) < 32 else 0
    height, width = (((side + 2 * padding - 4) // 2 - 4) // 2 for side in sides)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5, padding=padding),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flat=nn.Flatten(),
            dense1=nn.Linear(16 * height * width, 120),
            relu3=nn.ReLU(),
            dense2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            head=nn.Linear(84, classes),
        )
    )


@register_model("har-cnn")
def har_cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """For windows of sensor readings (sensors, 1, length), as PFLlib's HARCNN: two convolutions over 9 readings, pooled
    by two, and dense layers of 1024 and 512.

    >>> sum(p.numel() for p in har_cnn((9, 1, 128), 6).parameters())
    2253958
    """
    sensors, height, length = image_size("har-cnn", shape)
    after = ((length - 8) // 2 - 8) // 2
    if after < 1:
        raise ConfigError(f"har-cnn needs windows of 28 readings or more, seen samples of shape {shape}: use 'mlp'")
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(sensors, 32, (1, 9)),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d((1, 2)),
            conv2=nn.Conv2d(32, 64, (1, 9)),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d((1, 2)),
            flat=nn.Flatten(),
            dense1=nn.Linear(64 * height * after, 1024),
            relu3=nn.ReLU(),
            dense2=nn.Linear(1024, 512),
            relu4=nn.ReLU(),
            head=nn.Linear(512, classes),
        )
    )
