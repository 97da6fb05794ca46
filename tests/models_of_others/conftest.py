"""Models of other libraries, in an environment of their own: `make models`. Elsewhere these tests are skipped."""

import os
from importlib.util import find_spec

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # every model is built from its config
collect_ignore_glob = [] if find_spec("transformers") else ["*"]

_compiled = torch.library.Library("torchvision", "FRAGMENT")


def _stand_in_for_compiled_operations():
    """torchvision is compiled for a torch with CUDA; beside one without, its import asks for operations by name."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _compiled.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    _stand_in_for_compiled_operations()
