"""Networks by name. The last layer is always called `head`."""

from sparing.task.models import resnet, text, vgg
from sparing.task.models.names import MODELS, Builder, network, register
from sparing.task.models.small import cnn, fedavg_cnn, lenet5, mlp

__all__ = [
    "MODELS", "Builder", "cnn", "fedavg_cnn", "lenet5", "mlp", "network", "register", "resnet", "text", "vgg",
]  # fmt: skip
