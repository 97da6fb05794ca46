"""One client's samples from what people keep them in: arrays, dicts or tuples of these, a Dataset, a DataLoader."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.utils.data as torch_data
from torch import Tensor

from sparing.core.errors import DataError
from sparing.data.arrays import to_tensor
from sparing.data.inputs import Inputs, Samples

_LABEL_KEYS = ("labels", "label")
_IMAGE_AXES = 4
_PLAIN_COLLATES = (torch_data.default_collate, torch_data.default_convert)


def is_dataset(value: Any) -> bool:
    """Whether this is a Dataset or DataLoader of torch, or a dataset of Hugging Face."""
    hub = type(value).__module__.partition(".")[0] == "datasets" and hasattr(value, "__getitem__")
    return hub or isinstance(value, torch_data.Dataset | torch_data.DataLoader)


def collected_pair(client: Any, what: str) -> Any:
    """(x, y) of all items of a dataset, read once: a random transform is drawn once; anything else as it is.

    A DataLoader stands for its dataset; how many samples make a batch is `local.batch`. Its own `collate_fn` is given
    all items at once. An item is (x, y), (x1, x2, ..., y), or a dict in which `labels` or `label` are the targets.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> collected_pair(TensorDataset(torch.zeros(2, 1), torch.tensor([0, 1])), "client 0")
    ([tensor([0.]), tensor([0.])], [tensor(0), tensor(1)])
    """
    if not is_dataset(client):
        return client
    dataset, places, collate = client, None, None
    if isinstance(client, torch_data.DataLoader):
        dataset, places = client.dataset, _places_of_loader(client, what)
        collate = None if client.collate_fn in _PLAIN_COLLATES else client.collate_fn
    if isinstance(dataset, torch_data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise DataError(
            f"{what} is a {type(dataset).__name__}, which gives its samples in a stream: give a Dataset with len() and "
            "an index, or arrays"
        )
    items = [dataset[i] for i in (range(len(dataset)) if places is None else places)]  # type: ignore[arg-type]
    if collate is not None and items:
        return _split_item(collate(items), what)
    pairs = [_split_item(item, what) for item in items]
    return _gathered([x for x, _ in pairs]), [y for _, y in pairs]


def _places_of_loader(loader: torch_data.DataLoader, what: str) -> Sequence[int] | None:
    """Which items of its dataset a loader gives; None: all of them."""
    usual = type(loader.batch_sampler) in (torch_data.BatchSampler, type(None))
    if usual and isinstance(loader.sampler, torch_data.SubsetRandomSampler):
        return sorted(int(i) for i in loader.sampler.indices)
    if not usual or not isinstance(loader.sampler, torch_data.SequentialSampler | torch_data.RandomSampler):
        odd = loader.sampler if usual else loader.batch_sampler
        raise DataError(
            f"{what} is a DataLoader with a {type(odd).__name__}, which chooses its own samples: give a Dataset, or a "
            "Subset of one"
        )
    return None


def _split_item(item: Any, what: str) -> tuple[Any, Any]:
    """Samples and targets of one item, or of a batch of them."""
    if isinstance(item, Mapping):
        key = next((key for key in _LABEL_KEYS if key in item), None)
        if key is None:
            raise DataError(f"{what} has items with the keys {', '.join(map(str, item))}: name the targets 'labels'")
        return {name: x for name, x in item.items() if name != key}, item[key]
    if not isinstance(item, tuple | list) or len(item) < 2:
        raise DataError(f"{what} has items of type {type(item).__name__}: let its dataset give (x, y)")
    return (item[0] if len(item) == 2 else tuple(item[:-1])), item[-1]


def _gathered(samples: list[Any]) -> Any:
    """Samples one by one as one list, or as a dict or tuple of lists."""
    if samples and isinstance(samples[0], Mapping):
        return {name: [x[name] for x in samples] for name in samples[0]}
    if samples and isinstance(samples[0], tuple):
        return tuple(_Column(x) for x in zip(*samples, strict=True))
    return samples


class _Column(list):
    """One of several inputs, of all samples: a plain list would be one sample."""


def samples_from(values: Any, y: Any, what: str) -> Samples:
    """A dict of arrays is keyword arguments of the model, a tuple of arrays positional ones, anything else one array.

    A tuple may also hold the samples one by one: there are as many of them as targets, and they are not as long.

    >>> samples_from({"a": [[1, 2]], "b": [[0.5]]}, [1], "x").names
    ('a', 'b')
    """
    if isinstance(values, Mapping):
        if not values or not all(isinstance(name, str) for name in values):
            raise DataError(f"{what} has the keys {list(values)}: name the model's arguments, such as input_ids")
        return Inputs(tuple(_one_input(x, f"{what}[{name!r}]") for name, x in values.items()), tuple(values))
    if _is_several_inputs(values, y):
        return Inputs(tuple(_one_input(x, f"{what}[{i}]") for i, x in enumerate(values)))
    return to_tensor(values, what, pixels=True)


def _is_several_inputs(values: Any, y: Any) -> bool:
    if not isinstance(values, tuple) or not values:
        return False
    if not all(isinstance(x, _Column) or (isinstance(x, Tensor | np.ndarray) and x.ndim > 0) for x in values):
        return False
    n = len(y) if isinstance(y, list | tuple) or getattr(y, "ndim", 0) else -1
    return len(values) != n or all(len(x) == n for x in values)


def _one_input(values: Any, what: str) -> Tensor:
    """Only images stay uint8, to become floats in [0, 1]: a mask is of whole numbers."""
    x = to_tensor(list(values) if isinstance(values, _Column) else values, what, pixels=True)
    return x if x.ndim == _IMAGE_AXES else to_tensor(x, what)
