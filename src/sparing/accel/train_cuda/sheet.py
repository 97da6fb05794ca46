"""What steps on a GPU are told: samples, keys and padding of every step lie on the device, and which step it is.

A replay needs nothing from the host: the step stands in a tensor, and samples are gathered and varied on the device.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparing.accel.grown import Grown
from sparing.accel.train_stacked.schedule import StepTable
from sparing.core.ops import place
from sparing.core.tree import Tree
from sparing.data.augment import augment_batch
from sparing.data.clients import Clients
from sparing.data.dataset import to_network_input


class Played(NamedTuple):
    """What came of a phase."""

    after: Grown  # the models, in the order of ctx.ids
    losses: Tensor  # [S, K] float64, in the table's
    counts: Tensor  # [S, K] the table's, on the device; until the next play
    names: list[str]  # of what was trained
    peaks: Tensor  # [names, K] finite where that is


class StepBatch(NamedTuple):
    """Of k clients, in one step."""

    x: Tensor  # [k, width, ...]
    y: Tensor
    keys: Tensor  # [k] of dropout
    real: Tensor | None  # [k, width], where there may be padding


class StepSheet:
    """Room for the tables of k clients and so many steps."""

    def __init__(self, data: Clients, width: int, k: int, steps: int, padded: bool, device: torch.device) -> None:
        self.data, self.width, self.k = data, width, k
        self.t = torch.zeros(1, dtype=torch.int64, device=device)
        self.rows = torch.zeros(steps, width + 3, k, dtype=torch.int64, device=device)
        self.real = torch.ones(steps, k, width, dtype=torch.bool, device=device) if padded else None
        self.seen = torch.zeros(steps, k, device=device)

    def load(self, table: StepTable) -> None:
        steps, k = len(table.alive), table.order.shape[0]
        _bring(self.rows[:steps, :, :k], _step_rows(table))
        if self.real is not None:
            _bring(self.real[:steps, :k], table.real)

    def draw(self) -> StepBatch:
        """The batch of the step that it is."""
        row = self.rows.index_select(0, self.t)[0]
        at, keys, views = row[: self.width].T.contiguous(), row[self.width], row[self.width + 1]
        real = None if self.real is None else self.real.index_select(0, self.t)[0]
        assert isinstance(self.data.x, Tensor)
        x = to_network_input(self.data.x[at])
        if self.data.augment:
            x = augment_batch(x, views, self.data.augment)
        return StepBatch(x, self.data.y[at], keys, real)

    def note(self, losses: Tensor) -> None:
        """The step's losses `[k]`; then it is the next one."""
        self.seen.index_copy_(0, self.t, losses[None].float())
        self.t.add_(1)

    def told(self, table: StepTable) -> tuple[Tensor, Tensor]:
        """The losses and how many samples count in each, `[S, K]`."""
        steps, k = len(table.alive), table.order.shape[0]
        return self.seen[:steps, :k].double(), self.rows[:steps, -1, :k]

    def record(self, what: Callable[[], None]) -> torch.cuda.CUDAGraph:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.t.zero_()
                what()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self.t.zero_()
        pool = shared_pool(self.t.device)
        with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):  # other threads may wait for the GPU
            what()
        return graph


def shared_pool(device: torch.device) -> Any:
    """Memory for what comes and goes within a graph. All graphs take turns in it, as all that they leave behind stands
    elsewhere, and none is replayed beside another."""
    return _pool_keeper(device).pool()


@cache
def _pool_keeper(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that never goes: with its last one, a pool would."""
    keeper = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(keeper, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)
    return keeper


def as_read(samples: Tensor, dtype: torch.dtype) -> Tensor:
    """Samples `[k, width, ...]` in the numbers and the order of axes that the first layer reads."""
    if not samples.is_floating_point():
        return samples
    if samples.ndim != 5:
        return samples.to(dtype)
    k = samples.shape[0]
    return samples.flatten(0, 1).to(dtype, memory_format=torch.channels_last).unflatten(0, (k, -1))


def unmoved(k: int, start: Tensor, formed: bool) -> Tensor:
    """What was added to a tensor of k clients that did not move; not formed, it takes no room."""
    zero = torch.zeros((), dtype=start.dtype, device=start.device).expand(k, *start.shape[1:])
    return zero.clone(memory_format=torch.contiguous_format) if formed else zero


def names_in_place(model: nn.Module, state: Tree) -> frozenset[str]:
    """Frozen weights that stand where the model itself has them: a recording reads them there, and holds no copy."""
    frozen = (pair for pair in model.named_parameters(remove_duplicate=False) if not pair[1].requires_grad)
    return frozenset(name for name, p in frozen if name in state and p.data_ptr() == state[name].data_ptr())


def _bring(into: Tensor, x: Tensor) -> None:
    """Copy to the device without waiting for it."""
    into.copy_(x if x.is_cuda or not into.is_cuda else x.pin_memory(), non_blocking=True)


def _step_rows(table: StepTable) -> Tensor:
    """What the host says of every step: the places of samples, the keys of dropout and of augmentation, and how many
    samples enter the reported loss, `[S, batch + 3, K]`."""
    beside = place(torch.stack([table.keys, table.views, table.counts], 1), table.places.device)
    return torch.cat([table.places.transpose(1, 2), beside], 1)
