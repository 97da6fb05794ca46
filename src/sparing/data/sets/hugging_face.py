"""Any dataset of the Hugging Face hub, through the library `datasets`."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from sparing.core.errors import DataError, nearest_name
from sparing.data.cache import cached_dataset
from sparing.data.dataset import Dataset
from sparing.data.files.images import image_to_array
from sparing.data.pooling import SourcePart, number_keys, pool_parts
from sparing.data.registry import register_dataset

_SAMPLE_COLUMNS = ("image", "img", "pixel_values", "x", "features")
_LABEL_COLUMNS = ("label", "labels", "fine_label", "y", "target")


@register_dataset("hf:NAME")
def _load_hugging_face(
    name: str,
    config: str | None = None,
    x: str | None = None,
    y: str | None = None,
    groups: Sequence[str] = (),
    side: int | None = None,
    gray: bool = False,
) -> Dataset:
    """Any dataset of the Hugging Face hub: `x` and `y` are its columns, `groups` those with natural ids

    Its split called test is the official one. Pictures are squeezed to `side` where one is given.
    """
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise DataError(f"hf:{name} needs the library `datasets`: pip install 'sparing[hf]'") from None
    try:
        splits = library.load_dataset(name, config)
    except Exception as error:  # whatever the hub, the network or the dataset's author may cause
        raise DataError(f"hf:{name} cannot be loaded ({error}): check the name and the connection") from None
    splits = dict(splits) if hasattr(splits, "keys") else {"train": splits}
    splits = {split: splits[split] for split in ("train", "test") if split in splits} or splits
    columns = next(iter(splits.values())).column_names
    x, y = _chosen_column(name, x, _SAMPLE_COLUMNS, columns), _chosen_column(name, y, _LABEL_COLUMNS, columns)
    groups = [_chosen_column(name, group, (), columns) for group in ([groups] if isinstance(groups, str) else groups)]
    options = {"x": x, "y": y, "groups": list(groups), "side": side, "gray": gray, "config": config}
    versions = [f"{split} {getattr(rows, '_fingerprint', len(rows))}" for split, rows in splits.items()]
    return cached_dataset(f"hf-{name}", versions, options, lambda: _read_splits(name, splits, x, y, groups, side, gray))


def _chosen_column(name: str, asked: str | None, usual: Sequence[str], columns: Sequence[str]) -> str:
    if asked is not None and asked not in columns:
        raise DataError(f"hf:{name} has no column {asked!r}; {nearest_name(asked, columns)}")
    found = [asked] if asked is not None else [one for one in usual if one in columns]
    if not found:
        raise DataError(
            f"hf:{name} has none of the columns {', '.join(usual)}: name one of {', '.join(columns)} as x= or y="
        )
    return found[0]


def _read_splits(
    name: str, splits: dict[str, Any], x: str, y: str, groups: Sequence[str], side: int | None, gray: bool
) -> Dataset:
    parts, official = [], []
    ids: dict[str, list[Any]] = {group: [] for group in groups}
    for split, rows in splits.items():
        where = f"hf:{name}, {split},"
        parts.append(SourcePart(where, _column_array(rows[x], where, side, gray), np.asarray(rows[y])))
        official += [split == "test"] * len(rows)
        for group in groups:
            ids[group] += list(rows[group])
    images, labels = pool_parts(parts)
    feature = getattr(next(iter(splits.values())), "features", {}).get(y)
    meaning = list(getattr(feature, "names", None) or map(str, range(int(labels.max()) + 1)))
    found = {group: number_keys(keys) for group, keys in ids.items()}
    names = {"class": meaning, **{group: called for group, (_, called) in found.items()}}
    numbers = {group: number for group, (number, _) in found.items()}
    tested = torch.tensor(official) if len(splits) > 1 else None
    return Dataset(name, images, labels, len(meaning), tested, numbers, names)


def _column_array(rows: Any, where: str, side: int | None, gray: bool) -> np.ndarray:
    """One array of a column of pictures or numbers."""
    every = [image_to_array(row, side, gray) if isinstance(row, Image.Image) else np.asarray(row) for row in rows]
    shapes = sorted({row.shape for row in every})
    if len(shapes) > 1:
        raise DataError(f"{where} has samples of mixed shapes, {shapes[0]} and {shapes[1]}: give side= for pictures")
    return np.stack(every)
