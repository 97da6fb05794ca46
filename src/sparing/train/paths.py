"""The paths of local training by their names. `loop` is always there; accelerators register others."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from sparing.core.errors import ConfigError, nearest_name
from sparing.core.operation import install_waiting
from sparing.core.tree import Models
from sparing.train.call import PathCall
from sparing.train.evaluate import PLAIN_RUNNER, Runner
from sparing.train.loop import train_loop


class TrainPath(NamedTuple):
    train: Callable[[PathCall], tuple[Models, Tensor]]  # the models after training, `[K, ...]`, and the losses `[K]`
    runner: Runner  # how models are evaluated by those who train so
    in_turn: bool  # one client after the other: a row has the same bits in any chunk


PATHS: dict[str, TrainPath] = {"loop": TrainPath(train_loop, PLAIN_RUNNER, in_turn=True)}


def path_called(name: str) -> TrainPath:
    install_waiting()
    if name not in PATHS:
        raise ConfigError(f"no path is called {name!r}: {nearest_name(name, PATHS)}")
    return PATHS[name]
