"""Residual networks: resnet18, resnet34 and resnet50."""

from collections import OrderedDict
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from sparing.models.norms import MeanPool, Norm, norm2d
from sparing.models.registry import image_size, register_model

_Stem = Literal["auto", "cifar", "imagenet"]
_SMALL_SIDE = 64
"""Images up to this side get the CIFAR stem."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    widening = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, width, 3, stride), norm2d(norm, width)
        self.conv2, self.norm2 = _conv(width, width, 3), norm2d(norm, width)
        self.shortcut = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + self.shortcut(x))


class BottleneckBlock(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; the stride is at the 3x3."""

    widening = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm):
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, width, 1), norm2d(norm, width)
        self.conv2, self.norm2 = _conv(width, width, 3, stride), norm2d(norm, width)
        self.conv3, self.norm3 = _conv(width, 4 * width, 1), norm2d(norm, 4 * width)
        self.shortcut = _shortcut(inputs, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return F.relu(y + self.shortcut(x))


def _conv(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(OrderedDict(conv=_conv(inputs, outputs, 1, stride), norm=norm2d(norm, outputs)))


def resnet(
    block: type[BasicBlock] | type[BottleneckBlock],
    depths: tuple[int, ...],
    channels: int,
    classes: int,
    norm: Norm = "group",
    small: bool = True,
    width: int = 64,
) -> nn.Sequential:
    """Stem, layers of blocks each half as wide in space and twice in channels as the one before, mean, head.

    `small`: the stem is one 3x3 convolution (CIFAR); else 7x7 with stride 2, and pooling (ImageNet).

    >>> net = resnet(BasicBlock, (1, 1), channels=3, classes=10, width=8)
    >>> [name for name, _ in net.named_children()]
    ['stem', 'layer1', 'layer2', 'pool', 'head']
    """
    first = _conv(channels, width, 3) if small else _conv(channels, width, 7, 2)
    stem: dict[str, nn.Module] = {"conv": first, "norm": norm2d(norm, width), "relu": nn.ReLU()}
    if not small:
        stem["pool"] = nn.MaxPool2d(3, 2, padding=1)
    layers: dict[str, nn.Module] = {"stem": nn.Sequential(OrderedDict(stem))}
    inputs = width
    for i, depth in enumerate(depths):
        blocks = []
        for j in range(depth):
            blocks.append(block(inputs, width << i, 2 if i and not j else 1, norm))
            inputs = (width << i) * block.widening
        layers[f"layer{i + 1}"] = nn.Sequential(*blocks)
    return nn.Sequential(OrderedDict(layers, pool=MeanPool(), head=nn.Linear(inputs, classes)))


def _has_small_images(name: str, shape: tuple[int, ...], stem: _Stem) -> bool:
    _, height, width = image_size(name, shape)
    return max(height, width) <= _SMALL_SIDE if stem == "auto" else stem == "cifar"


@register_model("resnet18")
def _resnet18(shape: tuple[int, ...], classes: int, norm: Norm = "group", stem: _Stem = "auto") -> nn.Sequential:
    small = _has_small_images("resnet18", shape, stem)
    return resnet(BasicBlock, (2, 2, 2, 2), shape[0], classes, norm, small)


@register_model("resnet34")
def _resnet34(shape: tuple[int, ...], classes: int, norm: Norm = "group", stem: _Stem = "auto") -> nn.Sequential:
    small = _has_small_images("resnet34", shape, stem)
    return resnet(BasicBlock, (3, 4, 6, 3), shape[0], classes, norm, small)


@register_model("resnet50")
def _resnet50(shape: tuple[int, ...], classes: int, norm: Norm = "group", stem: _Stem = "auto") -> nn.Sequential:
    small = _has_small_images("resnet50", shape, stem)
    return resnet(BottleneckBlock, (3, 4, 6, 3), shape[0], classes, norm, small)
