"""What every dataset must satisfy, and how parts that were read from several files become one pool."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import DataError
from sparing.data.dataset import IGNORED, Dataset
from sparing.data.files.unpacking import damage_as_data_error
from sparing.data.inputs import sample_tensors


class SourcePart(NamedTuple):
    """Samples and labels from one place, which an error message names."""

    where: str
    x: np.ndarray
    y: np.ndarray


def pool_parts(parts: Sequence[SourcePart], classes: int | None = None) -> tuple[Tensor, Tensor]:
    """All parts end to end, as x and y of a Dataset; refused where they do not fit together.

    >>> x, y = pool_parts([SourcePart("a", np.zeros((2, 4, 4), np.uint8), np.array([0, 1]))])
    >>> x.shape, y.tolist()
    (torch.Size([2, 1, 4, 4]), [0, 1])
    """
    parts = [_check_part(part, classes) for part in parts]
    filled = [part for part in parts if len(part.x)] or parts[:1]
    if not filled:
        raise DataError("there are no samples: give some")
    first = filled[0]
    for part in filled:
        if part.x.shape[1:] != first.x.shape[1:]:
            raise DataError(
                f"mixed shapes: {part.where} has {part.x.shape[1:]} but {first.where} has "
                f"{first.x.shape[1:]}: bring all samples to one shape"
            )
        if _stored_type(part.x) != _stored_type(first.x):
            raise DataError(
                f"mixed types: {part.where} has {_stored_type(part.x)} but {first.where} has {_stored_type(first.x)}: "
                "save all samples as one type"
            )
        if part.y.shape[1:] != first.y.shape[1:]:
            raise DataError(
                f"mixed labels: {part.where} has {part.y.shape[1:]} a sample but {first.where} has "
                f"{first.y.shape[1:]}: bring all labels to one shape"
            )
    x, y = (
        _join_as([part.x for part in filled], _stored_type(first.x)),
        _join_as([part.y for part in filled], _LABEL_TYPE),
    )
    return torch.from_numpy(x), torch.from_numpy(y)


_LABEL_TYPE = np.dtype(np.int64)
_EXACT_BELOW = 2.0**53  # up to which a float tells whole numbers apart


def _check_part(part: SourcePart, classes: int | None) -> SourcePart:
    """The part with its axes in place and its values in range, but of the types that it came with."""
    part = SourcePart(part.where, _part_samples(part), _part_labels(part))
    if len(part.x) != len(part.y):
        raise DataError(f"{part.where} has {len(part.x)} samples but {len(part.y)} labels: each needs one")
    _check_label_range(part.y, classes, part.where)
    return part


def _join_as(arrays: Sequence[np.ndarray], kind: np.dtype) -> np.ndarray:
    """The arrays end to end as this type, each converted where it comes to stand."""
    out = np.empty((sum(map(len, arrays)), *arrays[0].shape[1:]), kind)
    at = 0
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, which `check_trainable` refuses
        for array in arrays:
            out[at : at + len(array)] = array
            at += len(array)
    return out


def _part_samples(part: SourcePart) -> np.ndarray:
    """Numbers of shape `[n, ...]`, uint8 images as `[n, C, H, W]`."""
    x = to_number_array(part.x, f"{part.where} has x")
    if x.dtype.kind not in "fiub" or x.ndim < 2:
        raise DataError(f"{part.where} has x of type {x.dtype} and shape {x.shape}: give numbers of shape [n, ...]")
    if x.dtype == np.uint64 and x.size and x.max() > np.iinfo(np.int64).max:
        raise DataError(f"{part.where} has x of {x.max()}, which is too large for int64: give smaller numbers")
    if x.dtype == np.uint8:
        if x.ndim == 3:
            return x[:, None]
        last = x.ndim == 4 and x.shape[-1] in (1, 3) and x.shape[1] not in (1, 3)
        return np.moveaxis(x, -1, 1) if last else x
    return x


def _stored_type(x: np.ndarray) -> np.dtype:
    """The type in which samples are held: uint8 images as they are, floats as float32, other integers as int64."""
    if x.dtype == np.uint8:
        return x.dtype
    return np.dtype(np.int64 if x.dtype.kind in "iu" else np.float32)


def _part_labels(part: SourcePart) -> np.ndarray:
    """Labels `[n]`, or `[n, T]` for text; floats that are whole numbers will do."""
    y = to_number_array(part.y, f"{part.where} has labels")
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.dtype.kind not in "fiub" or y.ndim not in (1, 2) or (y.dtype.kind == "f" and not _all_whole(y)):
        values = ", or, where they are values, name a loader of your own, such as my_file.py:load"
        raise DataError(
            f"{part.where} has labels of type {y.dtype} that are no class numbers: give integers 0, 1, 2, ..."
            + values * (y.dtype.kind == "f")
        )
    return y


def _all_whole(y: np.ndarray) -> bool:
    return bool(np.array_equal(y, np.rint(y)) and (np.abs(y) < _EXACT_BELOW).all())


def to_number_array(values: Any, what: str) -> np.ndarray:
    """An array as it is; lists of numbers, however nested, as one."""
    if isinstance(values, np.ndarray):
        return values
    inner = [[values]]
    while inner:  # numpy would make room for the longest text as often as there are values
        for one in inner.pop():
            if isinstance(one, list | tuple):
                inner.append(list(one))
            elif not isinstance(one, int | float | np.ndarray | np.generic):
                raise DataError(f"{what} of type {type(one).__name__}: give numbers")
    with damage_as_data_error(f"{what} of mixed shapes: give numbers of one shape"):
        return np.asarray(values)


_MOST_CLASSES = 1_000_000


def check_trainable(dataset: Dataset) -> Dataset:
    """The dataset itself, if it can be trained on."""
    check_consistent(dataset)
    for _, x in sample_tensors(dataset.x):
        if x.is_floating_point() and not bool(x.isfinite().all()):
            at = int((~x.isfinite()).flatten(1).any(1).nonzero()[0])
            raise DataError(f"{dataset.name}: sample {at} has a value that is not finite: remove or repair it")
    return dataset


def check_consistent(dataset: Dataset) -> Dataset:
    """The dataset itself, if there is one of everything for each sample, and its labels are in range."""
    n = len(dataset.y)
    if not n:
        raise DataError(f"{dataset.name} holds no samples: give it some")
    if not 1 <= dataset.classes <= _MOST_CLASSES:
        raise DataError(
            f"{dataset.name} has {dataset.classes:,} classes; there may be {_MOST_CLASSES:,}: number them 0, 1, 2, ..."
        )
    sizes = {"x": dataset.x, **dataset.groups, **({} if dataset.official is None else {"official": dataset.official})}
    for what, values in sizes.items():
        if len(values) != n:
            raise DataError(f"{dataset.name} has {n} labels but {len(values)} entries of {what}: each sample needs one")
    _check_label_range(dataset.y.numpy(), dataset.classes, dataset.name)
    return dataset


def _check_label_range(y: np.ndarray, classes: int | None, where: str) -> None:
    odd = (y < 0) | (y >= (np.inf if classes is None else classes))
    bad = np.argwhere(odd if y.ndim == 1 else odd & (y != IGNORED))
    if len(bad):
        end = "" if classes is None else f" to {classes - 1}"
        seen = int(y[tuple(bad[0])])
        raise DataError(
            f"{where}: the label of sample {bad[0][0]} is {seen}, out of range: number the classes 0, 1, ...{end}"
        )


def number_keys(values: Sequence[Any] | np.ndarray) -> tuple[Tensor, list[str]]:
    """Ids 0, 1, 2, ... for natural keys, in natural order, and what they mean.

    >>> number_keys(["b10", "b9", "b10"])
    (tensor([1, 0, 1]), ['b9', 'b10'])
    """
    keys = [str(key) for key in (values.tolist() if isinstance(values, np.ndarray) else values)]
    names = sorted(sorted(set(keys)), key=natural_sort_key)
    rank = {name: i for i, name in enumerate(names)}
    return torch.tensor([rank[key] for key in keys], dtype=torch.int64), names


_MOST_DIGITS_IN_NAME = 400  # of a number in a name; longer ones count as text


def natural_sort_key(name: str) -> list[tuple[int, str]]:
    """A key that sorts 9 before 10."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() and len(part) < _MOST_DIGITS_IN_NAME else (-1, part) for part in parts]


def official_test_mask(train: int, test: int) -> Tensor:
    """`official` for a pool of train samples followed by test samples."""
    return torch.arange(train + test) >= train
