"""What every path of local training is given, and the checks of what comes out of it."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparing.core.context import Ctx
from sparing.core.errors import TrainingError
from sparing.core.method import Local, Phase
from sparing.core.operation import operation
from sparing.core.tree import Tree
from sparing.data.clients import Clients
from sparing.train.losses import Loss
from sparing.train.optim import Aside
from sparing.train.pieces import WHOLE, StepPieces
from sparing.train.working_copy import device_of_tree


class PathCall(NamedTuple):
    """One call of `train`: clients ctx.ids train from `start`, leaves `[K, *shape]` or `[1, *shape]`."""

    model: nn.Module
    loss: Loss
    data: Clients
    local: Local
    start: Tree
    ctx: Ctx
    memory: Tree  # velocities kept between rounds, overwritten
    anchor: Tree | None = None  # what FedProx's term draws to, where it is not the start
    pull: Tree | None = None  # what is added to the gradients of phases that `correct`
    precision: str = "float32"
    graph: bool = False  # whether a path may replay a recorded step
    threads: int = 1  # that work on one operation
    pieces: StepPieces = WHOLE  # of a step, on paths that train one client after the other

    @property
    def device(self) -> torch.device:
        return device_of_tree(self.start)

    @property
    def aside(self) -> Aside:
        return Aside(self.start if self.anchor is None else self.anchor, self.pull or {})

    @property
    def static(self) -> bool:
        return self.local.buffers == "static"


def check_finite(after: Mapping[str, Tensor], lesson: PathCall) -> None:
    """The last step's update is not seen by any loss, so look at the weights themselves."""
    for name, x in after.items():
        if x.data_ptr() == lesson.start[name].data_ptr():  # what is lent to all, and never moves
            continue
        if x.is_floating_point() and not seems_finite(x) and not bool((fine := x.isfinite().flatten(1).all(1)).all()):
            raise not_finite(name, int((~fine).nonzero()[0]), lesson)


@operation
def seems_finite(x: Tensor) -> bool:
    """Surely so if true. A sum costs little beside looking at every value."""
    return bool(x.sum().isfinite())


def not_finite(name: str, k: int, lesson: PathCall) -> TrainingError:
    how = lesson.local.phases[-1].optimiser
    return TrainingError(
        f"client {int(lesson.ctx.ids[k])}, round {lesson.ctx.round}: {name!r} is not finite after the last step "
        f"(lr {how.lr:g}, clip {how.clip}): lower lr or set clip"
    )


def diverged(value: float, client: int, round: int, phase: int, step: int, at: Phase) -> TrainingError:
    return TrainingError(
        f"client {client}, round {round}: the training loss became {value} at step {step + 1} of phase {phase + 1} "
        f"(lr {at.optimiser.lr:g}, clip {at.optimiser.clip}): lower lr or set clip"
    )
