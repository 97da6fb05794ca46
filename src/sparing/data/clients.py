"""The samples of N clients as two flat tensors, so that 100,000 clients cost no more objects than one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparing.core.errors import ConfigError, DataError
from sparing.data.arrays import dtype_name, to_tensor
from sparing.data.augment import Augment, check_image_shape

Pair = tuple[Any, Any]
"""One client's samples and targets: numpy arrays, tensors or nested lists."""


@dataclass(frozen=True, eq=False)
class Clients:
    """Client i owns samples `start[i] .. start[i] + count[i]` of `x [total, ...]` and `y [total, ...]`.

    `start` and `count` are int64 `[N]` on the CPU, whatever device the samples are on. Images may stay uint8: a batch
    becomes floats in [0, 1] when it is gathered. `augment` varies images while training, never while evaluating.

    >>> clients = Clients.of([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
    >>> len(clients), clients.count.tolist(), clients.client(1)
    (2, [2, 1], (tensor([[2.]]), tensor([1])))
    """

    x: Tensor
    y: Tensor
    start: Tensor
    count: Tensor
    augment: tuple[Augment, ...] = ()

    def __post_init__(self) -> None:
        if self.augment:
            check_image_shape("augment", tuple(self.x.shape[1:]))
            if not self.x.is_floating_point() and self.x.dtype != torch.uint8:
                raise ConfigError(f"augment is for images in floats or uint8, seen {dtype_name(self.x)}: leave it out")

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> "Clients":
        """One (x, y) per client, put end to end. Empty clients are allowed here; `Task` refuses them for training."""
        pairs = _list_pairs(pairs)
        _check_pairs(pairs)
        both = [
            (to_tensor(x, f"client {i}: x", pixels=True), to_tensor(y, f"client {i}: y"))
            for i, (x, y) in enumerate(pairs)
        ]
        if not both:
            raise DataError("there are no clients: give a list with one (x, y) pair per client")
        _check_equal_lengths(both)
        filled = [(i, x, y) for i, (x, y) in enumerate(both) if len(x)] or [(0, *both[0])]
        _check_same_shapes(filled)
        count = torch.tensor([len(x) for x, _ in both])
        return cls(
            torch.cat([x for _, x, _ in filled]), torch.cat([y for *_, y in filled]), count.cumsum(0) - count, count
        )

    def __len__(self) -> int:
        return len(self.count)

    def client(self, i: int) -> tuple[Tensor, Tensor]:
        """Client i's samples, as views."""
        span = slice(int(self.start[i]), int(self.start[i]) + int(self.count[i]))
        return self.x[span], self.y[span]

    def to(self, device: torch.device | str) -> "Clients":
        """The same clients with their samples on another device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def _list_pairs(pairs: Any) -> list[Pair]:
    if not isinstance(pairs, Iterable):
        raise DataError(f"the clients are of type {type(pairs).__name__}: give a list with one (x, y) pair per client")
    return list(pairs)


def _check_pairs(pairs: list[Pair]) -> None:
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(
                f"client {i} is a {type(pair).__name__}, not a pair: give a list with one (x, y) per client"
            )


def _check_equal_lengths(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for i, (x, y) in enumerate(pairs):
        if x.ndim == 0 or y.ndim == 0:
            raise DataError(f"client {i}: x and y must have a sample axis, seen a single number: wrap it in a list")
        if len(x) != len(y):
            raise DataError(f"client {i} has {len(x)} samples but {len(y)} targets: give one target per sample")


def _check_same_shapes(filled: list[tuple[int, Tensor, Tensor]]) -> None:
    first, x0, y0 = filled[0]
    for i, x, y in filled:
        for what, a, b in (("samples", x, x0), ("targets", y, y0)):
            seen, wanted = (tuple(a.shape[1:]), a.dtype), (tuple(b.shape[1:]), b.dtype)
            if seen != wanted:
                raise DataError(
                    f"client {i} has {what} of shape {seen[0]} and type {dtype_name(a)} but client {first} has shape "
                    f"{wanted[0]} and type {dtype_name(b)}: give all clients the same"
                )


def clients_from_pairs(what: str, pairs: Any) -> Clients:
    """Clients from pairs, whose refusals begin with the name of the set."""
    if isinstance(pairs, Clients):
        return pairs
    try:
        return Clients.of(pairs)
    except DataError as error:
        raise DataError(f"{what}: {error}") from None


def check_client_samples(data: Clients, what: str, labels: bool) -> None:
    """Refuse data that cannot be trained on; `labels`: integer targets are class numbers."""
    if not len(data):
        raise DataError(f"{what}: there are no clients: give a list with one (x, y) pair per client")
    if len(data.x) != len(data.y) or int((data.start + data.count).max()) > len(data.x):
        raise DataError(
            f"{what}: {len(data.x)} samples, {len(data.y)} targets and clients reaching up to "
            f"{int((data.start + data.count).max())}: give x, y, start and count that fit together"
        )
    check_sample_values(data, what, labels)


def check_sample_values(data: Clients, what: str, labels: bool) -> None:
    """The same of samples that may be no client's."""
    for name, values in (("x", data.x), ("y", data.y)):
        if values.is_floating_point():
            bad = ~values.isfinite().flatten(1).all(1) if values.ndim > 1 else ~values.isfinite()
            _refuse_first_bad_sample(bad, data, values, f"{what}: {name} is not finite", "remove or repair that sample")
    if labels and not data.y.is_floating_point():
        bad = (data.y < 0).flatten(1).any(1) if data.y.ndim > 1 else data.y < 0
        _refuse_first_bad_sample(bad, data, data.y, f"{what}: the label is negative", "number the classes 0, 1, 2, ...")


def check_no_empty_client(data: Clients, what: str) -> None:
    empty = (data.count < 1).nonzero().flatten()
    if len(empty):
        raise DataError(f"{what}: client {int(empty[0])} has no samples (0 of them): leave it out or give it some")


def check_same_scale(train: Tensor, other: Tensor, what: str) -> None:
    """Refuse uint8, which is scaled to [0, 1], beside numbers that are not and lie elsewhere."""
    if (train.dtype == torch.uint8) == (other.dtype == torch.uint8) or not train.numel() or not other.numel():
        return
    pixels, plain, x = ("train", what, other) if train.dtype == torch.uint8 else (what, "train", train)
    low, high = (float(bound) for bound in x.aminmax())
    if low < 0 or high > 1:
        raise DataError(
            f"{pixels}: x is uint8, which is scaled to [0, 1], but {plain}: x is {dtype_name(x)} "
            f"from {low:g} to {high:g}, "
            "which is not: give both as uint8, or both as floats on one scale"
        )


def _refuse_first_bad_sample(bad: Tensor, data: Clients, values: Tensor, problem: str, fix: str) -> None:
    """Name the first bad sample by client and place."""
    if not bool(bad.any()):
        return
    at = int(bad.nonzero()[0])
    owner = ((data.start <= at) & (at < data.start + data.count)).nonzero().flatten().tolist()
    value = values[at].flatten()
    value = value[~value.isfinite() if value.is_floating_point() else value < 0][0].item()
    where = f"client {owner[0]}, sample {at - int(data.start[owner[0]])}" if owner else f"sample {at}"
    where += " of no client" if not owner and len(data) else ""
    raise DataError(f"{problem} ({value}) at {where}: {fix}")
