"""Steps of k clients side by side on a GPU: a recorded graph forks over a few streams, and each takes its clients in
turn, so that the GPU is full although one client's batch is small.

On a CPU, where there are neither graphs nor streams, the same steps are taken one after the other.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparing.accel.grown import Grown
from sparing.accel.train_cuda.compiled_step import ClientTensors, known_step
from sparing.accel.train_cuda.sheet import Played, StepSheet, as_read, names_in_place, unmoved
from sparing.accel.train_stacked.schedule import StepTable
from sparing.core.method import Phase
from sparing.core.ops import place
from sparing.core.tree import Tree
from sparing.train.call import PathCall

ALIGNED = 16
"""Numbers: a client's tensors begin at multiples of so many, as compiled code likes them."""
STREAMS = range(4, 9)


class ClientStreams:
    """Room for k clients and so many steps; the table and the state only say what they look like."""

    padded = True

    def __init__(
        self, lesson: PathCall, phase: Phase, table: StepTable, k: int, steps: int, padded: bool, state: Tree
    ) -> None:
        device = lesson.device
        self.k, self.steps, self.step = k, steps, known_step(lesson, phase)
        work, momentum = self.step.work, phase.optimiser.momentum > 0
        self.half = torch.bfloat16 if self.step.half else torch.float32
        self.sheet = StepSheet(lesson.data, table.places.shape[2], k, steps, True, device)
        shapes = {name: work.state[name].shape for name in self.step.params}

        def rooms(dtype: torch.dtype, wanted: bool = True) -> Tree:
            return {name: client_rows(k, shape, dtype, device) for name, shape in shapes.items() if wanted}

        self.params, self.near = rooms(torch.float32), rooms(self.half, self.step.half)
        self.velocity = rooms(torch.float32, momentum)
        self.in_place = self._lent_as_they_are(names_in_place(lesson.model, state))
        self.others = {
            name: state[name]
            if name in self.in_place
            else client_rows(1 if state[name].shape[0] == 1 else k, x.shape, self._kept_as(x), device)
            for name, x in work.state.items()
            if name in self.step.others
        }
        self.losses = torch.zeros(k, ALIGNED, device=device)
        self.streams = [torch.cuda.Stream() for _ in range(stream_count(k))] if device.type == "cuda" else []
        self.load(state, table)
        self.graph = self.sheet.record(self.take_step) if device.type == "cuda" else None

    def _kept_as(self, x: Tensor) -> torch.dtype:
        return self.half if x.dtype == torch.float32 else x.dtype

    def _lent_as_they_are(self, names: frozenset[str]) -> frozenset[str]:
        """Those of what does not move that need no other numbers, and no other order of axes."""
        own = self.step.work.state
        return frozenset(
            n for n in names & set(self.step.others) if self._kept_as(own[n]) == own[n].dtype and own[n].ndim != 4
        )

    def load(self, state: Tree, table: StepTable) -> None:
        k, order = table.order.shape[0], None if table.ordered else place(table.order, self.sheet.t.device)
        rooms = self.params | {name: x for name, x in self.others.items() if name not in self.in_place}
        given = [state[name] if order is None or state[name].shape[0] == 1 else state[name][order] for name in rooms]
        into = [room[:k] if len(room) > 1 else room for room in rooms.values()]
        _copy_all(into, given)
        _copy_all(list(self.near.values()), [self.params[name] for name in self.near])
        for x in self.velocity.values():
            x.zero_()
        self.sheet.load(table)
        self.sheet.t.zero_()

    def take_step(self) -> None:
        """Of every client."""
        batch = self.sheet.draw()
        assert batch.real is not None
        x, y, real = (in_client_rows(part) for part in (as_read(batch.x, self.half), batch.y, batch.real))
        for turn, beside in enumerate(self._forked()):
            with beside:
                for k in range(turn, self.k, max(1, len(self.streams))):
                    self.step(self._of_client(k, x, y, real))
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        self.sheet.note(self.losses[:, 0])

    def _forked(self) -> list[AbstractContextManager[Any]]:
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        return [torch.cuda.stream(stream) for stream in self.streams] or [nullcontext()]

    def _of_client(self, k: int, x: Tensor, y: Tensor, real: Tensor) -> ClientTensors:
        params, near, velocity = (
            [room[k] for room in rooms.values()] for rooms in (self.params, self.near, self.velocity)
        )
        others = [room[k if len(room) > 1 else 0] for room in self.others.values()]
        return ClientTensors(params, near, velocity, others, x[k], y[k], real[k], self.losses[k])

    def play(self, state: Tree, table: StepTable) -> Played:
        """All steps of these clients."""
        self.load(state, table)
        for _ in table.alive:
            self.take_step() if self.graph is None else self.graph.replay()
        added = {name: self._added(room, state[name], table) for name, room in self.params.items()}
        peaks = [x.flatten(1).sum(1).double() for x in added.values()]
        work, k = self.step.work, table.order.shape[0]
        for name in self.others:
            formed = name in work.params or not isinstance(work.state[name], nn.Parameter)
            added[name] = unmoved(k, state[name], formed)
        start = {name: state[own] for name, own in work.alias.items()}
        after = Grown(start, {name: added[own] for name, own in work.alias.items()})
        none = torch.zeros(0, k, dtype=torch.float64, device=self.sheet.t.device)
        return Played(after, *self.sheet.told(table), self.step.params, torch.stack(peaks) if peaks else none)

    def _added(self, room: Tensor, start: Tensor, table: StepTable) -> Tensor:
        """`[K, *shape]` in the order of ctx.ids, and the usual order of axes."""
        k = table.order.shape[0]
        rows = room[:k] if table.ordered else room[place(table.order.argsort(), room.device)]
        return torch.sub(rows, start, out=torch.empty(rows.shape, device=room.device))


def stream_count(k: int) -> int:
    """So many that few stand idle in the last turn.

    >>> [stream_count(k) for k in (1, 2, 7, 11, 16, 20, 50)]
    [1, 2, 7, 6, 8, 5, 5]
    """
    some = [n for n in STREAMS if n <= k] or [k]
    return min(some, key=lambda n: (-(-k // n) * n, -n))


def client_rows(k: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros `[k, *shape]` of which every row begins at a good place; channels of convolutions stand last.

    >>> rows = client_rows(2, torch.Size((4, 3, 2, 2)), torch.float32, torch.device("cpu"))
    >>> rows.shape, rows[1].is_contiguous(memory_format=torch.channels_last), rows.stride(0)
    (torch.Size([2, 4, 3, 2, 2]), True, 48)
    """
    n = math.prod(shape)
    flat = torch.zeros(k, max(1, -(-n // ALIGNED)) * ALIGNED, dtype=dtype, device=device)[:, :n]
    if len(shape) == 4:
        return flat.view(k, shape[0], *shape[2:], shape[1]).movedim(-1, 2)
    return flat.view(k, *shape)


def in_client_rows(x: Tensor) -> Tensor:
    """`[k, ...]` with every row at a good place, a copy where it is not."""
    n = math.prod(x.shape[1:])
    return x if n % ALIGNED == 0 else F.pad(x.reshape(len(x), n), (0, -n % ALIGNED))[:, :n].view(x.shape)


def _copy_all(into: list[Tensor], given: list[Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, given)  # pyright: ignore[reportPrivateImportUsage]
