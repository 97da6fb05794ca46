"""The samples of N clients as flat tensors, so that 100,000 clients cost no more objects than one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparing.core.errors import ConfigError, DataError
from sparing.data.arrays import dtype_name, to_tensor
from sparing.data.augment import Augment, check_image_shape
from sparing.data.collected import collected_pair, is_dataset, samples_from
from sparing.data.dataset import IGNORED
from sparing.data.inputs import Inputs, Samples, sample_tensors

Pair = tuple[Any, Any]
"""One client's samples and targets: numpy arrays, tensors or nested lists, or a dict or tuple of such samples."""


@dataclass(frozen=True, eq=False)
class Clients:
    """Client i owns samples `start[i] .. start[i] + count[i]` of `x [total, ...]` and `y [total, ...]`.

    `start` and `count` are int64 `[N]` on the CPU, whatever device the samples are on. Images may stay uint8: a batch
    becomes floats in [0, 1] when it is gathered. `augment` varies images while training, never while evaluating.
    Where a model takes several tensors, `x` holds them all.

    >>> clients = Clients.of([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
    >>> len(clients), clients.count.tolist(), clients.client(1)
    (2, [2, 1], (tensor([[2.]]), tensor([1])))
    """

    x: Samples
    y: Tensor
    start: Tensor
    count: Tensor
    augment: tuple[Augment, ...] = ()

    def __post_init__(self) -> None:
        if self.augment:
            if isinstance(self.x, Inputs):
                raise ConfigError("augment is for images, but the samples are several tensors: leave it out")
            check_image_shape("augment", tuple(self.x.shape[1:]))
            if not self.x.is_floating_point() and self.x.dtype != torch.uint8:
                raise ConfigError(f"augment is for images in floats or uint8, seen {dtype_name(self.x)}: leave it out")

    @classmethod
    def of(cls, pairs: Iterable[Pair]) -> "Clients":
        """One (x, y) or dataset each, end to end. Empty clients are allowed here; `Task` refuses them in `train`."""
        pairs = [collected_pair(client, f"client {i}") for i, client in enumerate(_list_pairs(pairs))]
        _check_pairs(pairs)
        both = [
            (samples_from(x, y, f"client {i}: x"), to_tensor(y, f"client {i}: y")) for i, (x, y) in enumerate(pairs)
        ]
        if not both:
            raise DataError("there are no clients: give a list with one (x, y) pair per client")
        _check_equal_lengths(both)
        filled = [(i, x, y) for i, (x, y) in enumerate(both) if len(x)] or [(0, *both[0])]
        filled = [(i, _named_alike(x, filled[0], i), y) for i, x, y in filled]
        _check_same_shapes(filled)
        count = torch.tensor([len(x) for x, _ in both])
        x, y = _end_to_end([x for _, x, _ in filled]), torch.cat([y for *_, y in filled])
        return cls(x, y, count.cumsum(0) - count, count)

    def __len__(self) -> int:
        return len(self.count)

    @property
    def is_whole(self) -> bool:
        """Whether everybody's samples are here; on a server, and on a node, they are not."""
        return int(self.count.sum()) <= len(self.y) and bool((self.start + self.count <= len(self.y)).all())

    def client(self, i: int) -> tuple[Samples, Tensor]:
        """Client i's samples, as views."""
        span = slice(int(self.start[i]), int(self.start[i]) + int(self.count[i]))
        return self.x[span], self.y[span]

    def to(self, device: torch.device | str) -> "Clients":
        """The same clients with their samples on another device."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))


def _list_pairs(pairs: Any) -> list[Pair]:
    if is_dataset(pairs):
        raise DataError(
            f"the clients are one {type(pairs).__name__}: give a list with one dataset or (x, y) per client"
        )
    if not isinstance(pairs, Iterable):
        raise DataError(f"the clients are of type {type(pairs).__name__}: give a list with one (x, y) pair per client")
    return list(pairs)


def _check_pairs(pairs: list[Pair]) -> None:
    for i, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise DataError(
                f"client {i} is a {type(pair).__name__}, not a pair: give a list with one (x, y) per client"
            )


def _check_equal_lengths(pairs: list[tuple[Samples, Tensor]]) -> None:
    for i, (x, y) in enumerate(pairs):
        for name, tensor in sample_tensors(x, ""):
            if tensor.ndim == 0 or y.ndim == 0:
                raise DataError(f"client {i}: x and y must have a sample axis, seen a single number: wrap it in a list")
            if len(tensor) != len(y):
                where = f" in x{name}" if name else ""
                raise DataError(
                    f"client {i} has {len(tensor)} samples{where} but {len(y)} targets: give one target per sample"
                )


def _named_alike(x: Samples, first: tuple[int, Samples, Tensor], i: int) -> Samples:
    """The tensors of these samples in the order of the first client's."""
    place, model, _ = first
    names = model.names if isinstance(model, Inputs) else None
    if isinstance(x, Inputs) and isinstance(model, Inputs) and len(x.tensors) == len(model.tensors):
        if x.names == names:
            return x
        if x.names is not None and names is not None and set(x.names) == set(names):
            return Inputs(tuple(x.tensors[x.names.index(name)] for name in names), names)
    elif isinstance(x, Tensor) and isinstance(model, Tensor):
        return x
    seen, wanted = (", ".join(name for name, _ in sample_tensors(one)) for one in (x, model))
    raise DataError(f"client {i} has the samples {seen} but client {place} has {wanted}: give all clients the same")


def _end_to_end(samples: list[Samples]) -> Samples:
    whole = [x for x in samples if isinstance(x, Tensor)]
    if whole:
        return torch.cat(whole)
    parts = [x for x in samples if isinstance(x, Inputs)]
    return Inputs(tuple(torch.cat(x) for x in zip(*(x.tensors for x in parts), strict=True)), parts[0].names)


def _check_same_shapes(filled: list[tuple[int, Samples, Tensor]]) -> None:
    first, x0, y0 = filled[0]
    for i, x, y in filled:
        inputs = zip(sample_tensors(x, ""), sample_tensors(x0, ""), strict=True)
        sides = [(f"samples x{name}" if name else "samples", a, b) for (name, a), (_, b) in inputs]
        for what, a, b in (*sides, ("targets", y, y0)):
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
    for name, values in (*sample_tensors(data.x), ("y", data.y)):
        if values.is_floating_point():
            what_is_wrong = f"{what}: {name} is not finite"
            _refuse_first_bad_sample(~values.isfinite(), data, values, what_is_wrong, "remove or repair that sample")
    if labels and not data.y.is_floating_point():
        text = data.y.ndim > 1
        fix = "number the classes 0, 1, 2, ..." + f", or {IGNORED} where nothing is guessed" * text
        bad = (data.y < 0) & (data.y != IGNORED) if text else data.y < 0
        _refuse_first_bad_sample(bad, data, data.y, f"{what}: the label is negative", fix)
        if text:
            _refuse_idle_client(data, what)


def _refuse_idle_client(data: Clients, what: str) -> None:
    """A client of whose sequences no target counts; of a client elsewhere nothing is known."""
    counts = torch.cat([torch.zeros(1, dtype=torch.int64), (data.y != IGNORED).flatten(1).any(1).cumsum(0).cpu()])
    here = (data.count > 0) & (data.start + data.count <= len(data.y))
    end = (data.start + data.count).clamp(max=len(data.y))
    idle = here & (counts[end] == counts[data.start.clamp(max=len(data.y))])
    if bool(idle.any()):
        client = int(idle.nonzero()[0])
        raise DataError(f"{what}: all targets of client {client} are {IGNORED}, so nothing counts there: leave it out")


def check_no_empty_client(data: Clients, what: str) -> None:
    empty = (data.count < 1).nonzero().flatten()
    if len(empty):
        raise DataError(f"{what}: client {int(empty[0])} has no samples (0 of them): leave it out or give it some")


def check_same_scale(train: Samples, other: Samples, what: str) -> None:
    """Refuse uint8, which is scaled to [0, 1], beside numbers that are not and lie elsewhere."""
    if isinstance(train, Inputs) or isinstance(other, Inputs):
        return
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
    """Name the first sample with a bad value, by client and place; `bad` has the shape of the values."""
    if not bool(bad.any()):
        return
    at = int(bad.nonzero()[0, 0])
    owner = ((data.start <= at) & (at < data.start + data.count)).nonzero().flatten().tolist()
    value = values[at].flatten()
    value = value[bad[at].flatten()][0].item()
    where = f"client {owner[0]}, sample {at - int(data.start[owner[0]])}" if owner else f"sample {at}"
    where += " of no client" if not owner and len(data) else ""
    raise DataError(f"{problem} ({value}) at {where}: {fix}")
