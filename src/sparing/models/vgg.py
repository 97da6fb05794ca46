"""VGG in its CIFAR form: the convolutions of the paper, one norm after each, and a single dense layer, the head.

The classifier of the paper (two dense layers of 4096) is made for 7x7 maps of ImageNet and would hold nearly all
parameters; on 32x32 images the maps end at 1x1. The convolutions keep their biases, as in the published counts.
"""

from collections import OrderedDict

from torch import nn

from sparing.models.norms import MeanPool, Norm, norm2d
from sparing.models.registry import image_size, register_model

_VGG11_STAGES = ((64,), (128,), (256,) * 2, (512,) * 2, (512,) * 2)
_VGG19_STAGES = ((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4)


def vgg(stages: tuple[tuple[int, ...], ...], channels: int, classes: int, norm: Norm = "group") -> nn.Sequential:
    """3x3 convolutions, halved in space after each stage.

    >>> [name for name, _ in vgg(((8,), (16, 16)), channels=3, classes=10).named_children()][-6:]
    ['conv3', 'norm3', 'relu3', 'pool2', 'pool', 'head']
    """
    layers: dict[str, nn.Module] = {}
    inputs, number = channels, 0
    for stage, widths in enumerate(stages, 1):
        for width in widths:
            number += 1
            layers[f"conv{number}"] = nn.Conv2d(inputs, width, 3, padding=1)
            layers[f"norm{number}"] = norm2d(norm, width)
            layers[f"relu{number}"] = nn.ReLU()
            inputs = width
        layers[f"pool{stage}"] = nn.MaxPool2d(2)
    return nn.Sequential(OrderedDict(layers, pool=MeanPool(), head=nn.Linear(inputs, classes)))


@register_model("vgg11")
def _vgg11(shape: tuple[int, ...], classes: int, norm: Norm = "group") -> nn.Sequential:
    return vgg(_VGG11_STAGES, image_size("vgg11", shape, least=32)[0], classes, norm)


@register_model("vgg19")
def _vgg19(shape: tuple[int, ...], classes: int, norm: Norm = "group") -> nn.Sequential:
    return vgg(_VGG19_STAGES, image_size("vgg19", shape, least=32)[0], classes, norm)
