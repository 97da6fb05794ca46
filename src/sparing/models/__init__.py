"""Networks by name. The last layer is always called `head`."""

from sparing.models import hugging_face_folder, resnet, text, vgg
from sparing.models.registry import MODELS, ModelBuilder, build_network, register_model
from sparing.models.small import cnn, fedavg_cnn, lenet5, mlp

__all__ = [
    "MODELS",
    "ModelBuilder",
    "build_network",
    "cnn",
    "fedavg_cnn",
    "hugging_face_folder",
    "lenet5",
    "mlp",
    "register_model",
    "resnet",
    "text",
    "vgg",
]  # fmt: skip
