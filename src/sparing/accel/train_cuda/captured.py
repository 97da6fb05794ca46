"""Local training of a chunk of clients on a GPU by a `Recording`: which one, and who may take part."""

import math
import threading
from collections.abc import Container
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparing.accel.bf16 import refuse_half_on_cuda
from sparing.accel.cuda import has_triton
from sparing.accel.train_cuda.recording import Recording
from sparing.accel.train_cuda.sheet import Played, names_in_place
from sparing.accel.train_stacked.schedule import StepTable, counted_in_tokens, reported_losses, step_table_here
from sparing.accel.train_stacked.stacked import train_stacked
from sparing.core.errors import TrainingError
from sparing.core.method import Local, Phase
from sparing.core.tree import Models, Tree
from sparing.train.call import PathCall, not_finite
from sparing.train.optim import is_sgd
from sparing.train.precision import multiplying_as

HALVES = (torch.bfloat16, torch.float16)
KEPT, AMPLE = 8, 4
"""Recordings kept for a model; how many times the room that is needed, in clients and in steps, one may have."""


def can_capture(local: Local, start: Tree, frozen: Container[str] = ()) -> bool:
    """Whether all that a step does can be replayed: SGD of one lr in float32 on CUDA, steered by nothing else.

    What is frozen may be in numbers of fewer bits.
    """
    plain = all(is_sgd(p.optimiser) and not p.prox and not p.correct and not p.holds for p in local.phases)
    here = all(
        x.is_cuda
        and x.dtype != torch.bool
        and (x.dtype == torch.float32 or not x.is_floating_point() or (name in frozen and x.dtype in HALVES))
        for name, x in start.items()
    )
    return plain and here and len(start) > 0 and has_triton()


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Weights that nobody trains, under all of their names."""
    return frozenset(name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad)


class Player(Protocol):
    """Room for k clients and so many steps, and a recorded step that trains them."""

    k: int
    steps: int
    padded: bool

    def play(self, state: Tree, table: StepTable) -> Played: ...


class Recorder(Protocol):
    """What makes one; the table and the state only say what they look like."""

    def __call__(
        self, lesson: PathCall, phase: Phase, table: StepTable, k: int, steps: int, padded: bool, state: Tree
    ) -> Player: ...


def train_recorded_or_stacked(lesson: PathCall) -> tuple[Models, Tensor]:
    """The path `stacked`: by a recorded step where that is allowed and possible, else operation by operation."""
    if may_record(lesson):
        out = play_phases(lesson, Recording)
        if out is not None:
            return out
    refuse_half_on_cuda(lesson)
    return train_stacked(lesson)


def may_record(lesson: PathCall) -> bool:
    steered = lesson.memory or lesson.anchor is not None or lesson.pull is not None
    single = isinstance(lesson.data.x, Tensor)  # a recording has one place for the samples
    capture = lesson.graph and single and not steered
    return capture and can_capture(lesson.local, lesson.start, frozen_names(lesson.model))


def play_phases(lesson: PathCall, recorder: Recorder) -> tuple[Models, Tensor] | None:
    """The models after the last phase and the reported losses `[K]`; None where clients differ too much to train in
    step."""
    with multiplying_as(lesson.precision):
        out = _play_in_step(lesson, recorder)
    if out is None:
        return None
    played, losses = out
    fine, names = played.peaks < math.inf, played.names  # magnitudes, so neither infinite nor NaN
    lesson.ctx.require(fine, lambda: _not_finite(fine, names, lesson))  # holds nothing that will be overwritten
    return played.after, losses


def _not_finite(fine: Tensor, names: list[str], lesson: PathCall) -> TrainingError:
    i, k = (~fine).nonzero()[0].tolist()
    return not_finite(names[i], k, lesson)


def _play_in_step(lesson: PathCall, recorder: Recorder) -> tuple[Played, Tensor] | None:
    data, phases, ctx = lesson.data, lesson.local.phases, lesson.ctx
    longest = int(data.count.max())  # of all clients: a recording has one width, and chunks should share it
    tables = [step_table_here(data, phase, number, ctx, longest) for number, phase in enumerate(phases)]
    if not all(_in_step(lesson.model, table) for table in tables):
        return None
    played, losses, state = None, torch.zeros(len(ctx.ids)), lesson.start
    for number, (phase, table) in enumerate(zip(phases, tables, strict=True)):
        state = state if played is None else state | dict(played.after)
        with TURN:
            played = find_player(recorder, lesson, phase, table, state).play(state, table)
            told = counted_in_tokens(table, lesson.loss, data.y)
            told = table._replace(counts=played.counts) if told is table else told
            losses = reported_losses(played.losses, told, phase, number, ctx)
    return None if played is None else (played, losses)


def _in_step(model: nn.Module, table: StepTable) -> bool:
    """Whether those who have finished early can stay in the batch: all finish together, or no statistics move."""
    even = table.alive[-1] == table.order.shape[0]
    return even or not any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in model.modules())


RECORDS: "WeakKeyDictionary[nn.Module, list[tuple[Any, Player]]]" = WeakKeyDictionary()
TURN = threading.Lock()
"""A recording has one place for everything, so it plays for one caller at a time."""


def find_player(recorder: Recorder, lesson: PathCall, phase: Phase, table: StepTable, state: Tree) -> Player:
    """The smallest that has room, made if there is none yet.

    The first is made to measure. Where clients come in different numbers, one made later has more room than those
    before it, so that there are soon enough: room that is not needed costs some time on the GPU, recording far more.
    """
    known = RECORDS.setdefault(lesson.model, [])
    steps, k = len(table.alive), table.order.shape[0]
    even = all(table.full) and set(table.width) == {table.places.shape[2]} and table.alive[-1] == k
    shared = tuple(name for name, x in state.items() if x.shape[0] == 1)
    key = (recorder, lesson.loss, lesson.data, phase, lesson.local.buffers, table.places.shape[2], shared)
    key = (*key, lesson.device, lesson.precision, names_in_place(lesson.model, state))
    alike = [record for other, record in known if other == key and (even or record.padded)]
    alike = [record for record in alike if record.k <= AMPLE * k and record.steps <= AMPLE * steps]
    fits = [record for record in alike if k <= record.k and steps <= record.steps]
    if fits:
        record = min(fits, key=lambda one: (one.k, one.padded, one.steps))
        known.sort(key=lambda one: one[1] is record)  # what was used last stands last
        return record
    k, steps = _roomy(k, [one.k for one in alike]), _roomy(steps, [one.steps for one in alike])
    del known[: -(KEPT - 1)]
    record = recorder(lesson, phase, table, k, steps, not even, state)
    known.append((key, record))
    return record


def forget_recordings(model: nn.Module) -> None:
    """Those of a trial, which are too small for what comes."""
    RECORDS.pop(model, None)


def _roomy(n: int, before: list[int]) -> int:
    """Room for n, with some to spare where it is more than there was before.

    >>> _roomy(12, []), _roomy(14, [12]), _roomy(10, [12, 18])
    (12, 18, 18)
    """
    most = max(before, default=n)
    return most if n <= most else -(-n * 5 // 4)
