"""Accelerators are registered here, all of them or none: SPARING_PLAIN=1 in the environment leaves the plain paths."""

import os

from sparing.accel.train_cpu.fast_copy import frozen_fast_copy, lend_frozen
from sparing.accel.train_cpu.implicit import train_implicit
from sparing.accel.train_cpu.loop_fast import train_loop_fast
from sparing.accel.train_cuda.captured import train_recorded_or_stacked
from sparing.accel.train_stacked.scores import stacked_scores
from sparing.train.evaluate import Runner
from sparing.train.paths import PATHS, TrainPath

SWITCH = "SPARING_PLAIN"


def install() -> None:
    """Register every accelerator, unless the environment asks for none."""
    if os.environ.get(SWITCH, "0") not in ("", "0"):
        return
    _install_paths()


def _install_paths() -> None:
    one_by_one = Runner(frozen_fast_copy, lend_frozen)
    at_once = Runner(frozen_fast_copy, lend_frozen, stacked_scores)
    PATHS["loop-fast"] = TrainPath(train_loop_fast, one_by_one, in_turn=True)
    PATHS["stacked"] = TrainPath(train_recorded_or_stacked, at_once, in_turn=False)
    PATHS["implicit"] = TrainPath(train_implicit, at_once, in_turn=False)
