"""The path `compiled`: every client's step is one compiled function, many of them side by side in a recorded graph.

For networks with much work in a step. What it cannot do is trained by path `stacked`.
"""

import warnings
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sparing.accel.train_cuda.captured import may_record, play_phases, train_recorded_or_stacked
from sparing.accel.train_cuda.client_streams import ClientStreams
from sparing.core.errors import SparingError
from sparing.core.method import Local
from sparing.core.tree import Models
from sparing.train.call import PathCall
from sparing.train.keyed_layers import CHANNEL_DROPOUTS

REFUSED: "WeakSet[nn.Module]" = WeakSet()
"""Models that turned out not to compile."""


def train_compiled(lesson: PathCall) -> tuple[Models, Tensor]:
    """The models after training and the reported losses `[K]`."""
    if may_record(lesson) and can_compile(lesson.model, lesson.local) and lesson.model not in REFUSED:
        out = _play_or_refuse(lesson)
        if out is not None:
            return out
    return train_recorded_or_stacked(lesson)


def can_compile(model: nn.Module, local: Local) -> bool:
    """Whether nothing is drawn in a step, no statistics move, and factors of layers are not steered."""
    still = local.buffers == "static"

    def fits(layer: nn.Module) -> bool:
        if isinstance(layer, (nn.Dropout, *CHANNEL_DROPOUTS)):
            return not layer.p
        return not isinstance(layer, _BatchNorm) or still or layer.running_mean is None

    return all(map(fits, model.modules())) and not any(phase.frobenius for phase in local.phases)


def _play_or_refuse(lesson: PathCall) -> tuple[Models, Tensor] | None:
    try:
        return play_phases(lesson, ClientStreams)
    except (SparingError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        REFUSED.add(lesson.model)
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"the model does not compile ({reason}), so path compiled trains as stacked does", stacklevel=2)
        return None
