"""What every dataset must satisfy, and how parts that were read from several files become one pool."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import DataError
from sparing.task.dataset import Dataset


class Part(NamedTuple):
    """Samples and labels from one place, which an error message names."""

    where: str
    x: np.ndarray
    y: np.ndarray


def pool(parts: Sequence[Part], classes: int | None = None) -> tuple[Tensor, Tensor]:
    """All parts end to end, as x and y of a Dataset; refused where they do not fit together.

    >>> x, y = pool([Part("a", np.zeros((2, 4, 4), np.uint8), np.array([0, 1]))])
    >>> x.shape, y.tolist()
    (torch.Size([2, 1, 4, 4]), [0, 1])
    """
    parts = [Part(part.where, samples(part), labels(part)) for part in parts]
    filled = [part for part in parts if len(part.x)] or parts[:1]
    for part in filled:
        if len(part.x) != len(part.y):
            raise DataError(f"{part.where} has {len(part.x)} samples but {len(part.y)} labels: each needs one")
        in_range(part.y, classes, part.where)
        if part.x.shape[1:] != filled[0].x.shape[1:]:
            raise DataError(
                f"mixed shapes: {part.where} has {part.x.shape[1:]} but {filled[0].where} has "
                f"{filled[0].x.shape[1:]}: bring all samples to one shape"
            )
        if part.x.dtype != filled[0].x.dtype:
            raise DataError(
                f"mixed types: {part.where} has {part.x.dtype} but {filled[0].where} has {filled[0].x.dtype}: "
                "save all samples as one type"
            )
    x, y = np.concatenate([part.x for part in filled]), np.concatenate([part.y for part in filled])
    return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y)


def samples(part: Part) -> np.ndarray:
    """uint8 images as `[n, C, H, W]`, floats as float32, other integers as int64."""
    x = np.asarray(part.x)
    if x.dtype == np.uint8:
        if x.ndim == 3:
            return x[:, None]
        last = x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3)
        return np.moveaxis(x, -1, 1) if last else x
    if x.dtype.kind not in "fiub" or x.ndim < 2:
        raise DataError(f"{part.where} has x of type {x.dtype} and shape {x.shape}: give numbers of shape [n, ...]")
    return x.astype(np.int64 if x.dtype.kind in "iu" else np.float32, copy=False)


def labels(part: Part) -> np.ndarray:
    """Labels as int64 `[n]`, or `[n, T]` for text; floats that are whole numbers will do."""
    y = np.asarray(part.y)
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.dtype.kind not in "fiub" or y.ndim == 0 or (y.dtype.kind == "f" and not np.array_equal(y, np.rint(y))):
        raise DataError(
            f"{part.where} has labels of type {y.dtype} that are no class numbers: give integers 0, 1, 2, ..."
        )
    return y.astype(np.int64, copy=False)


def sound(dataset: Dataset) -> Dataset:
    """The dataset itself, if it can be trained on."""
    n = len(dataset.y)
    if not n:
        raise DataError(f"{dataset.name} holds no samples: give it some")
    sizes = {"x": dataset.x, **dataset.groups, **({} if dataset.official is None else {"official": dataset.official})}
    for what, values in sizes.items():
        if len(values) != n:
            raise DataError(f"{dataset.name} has {n} labels but {len(values)} entries of {what}: each sample needs one")
    in_range(dataset.y.numpy(), dataset.classes, dataset.name)
    if dataset.x.is_floating_point() and not bool(dataset.x.isfinite().all()):
        at = int((~dataset.x.isfinite()).flatten(1).any(1).nonzero()[0])
        raise DataError(f"{dataset.name}: sample {at} has a value that is not finite: remove or repair it")
    return dataset


def in_range(y: np.ndarray, classes: int | None, where: str) -> None:
    bad = np.argwhere((y < 0) | (y >= (np.inf if classes is None else classes)))
    if len(bad):
        end = "" if classes is None else f" to {classes - 1}"
        seen = y[tuple(bad[0])]
        raise DataError(
            f"{where}: the label of sample {bad[0][0]} is {seen}, out of range: number the classes 0, 1, ...{end}"
        )


def numbered(values: Any) -> tuple[Tensor, list[str]]:
    """Ids 0, 1, 2, ... for natural keys, in natural order, and what they mean.

    >>> numbered(["b10", "b9", "b10"])
    (tensor([1, 0, 1]), ['b9', 'b10'])
    """
    keys, at = np.unique(np.asarray(values), return_inverse=True)
    names = [str(key) for key in keys.tolist()]
    order = sorted(range(len(names)), key=lambda i: natural(names[i]))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return torch.from_numpy(rank[at.reshape(-1)]), [names[i] for i in order]


def natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts 9 before 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def halves(train: int, test: int) -> Tensor:
    """`official` for a pool of train samples followed by test samples."""
    return torch.arange(train + test) >= train
