"""Any dataset of the Hugging Face hub, through the library `datasets`."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from sparing.core.errors import DataError, nearest
from sparing.task.data.cache import cached
from sparing.task.data.checks import Part, numbered, pool
from sparing.task.data.images import pixels
from sparing.task.data.registry import dataset
from sparing.task.dataset import Dataset

SAMPLES = ("image", "img", "pixel_values", "x", "features")
LABELS = ("label", "labels", "fine_label", "y", "target")


@dataset("hf:NAME")
def hf(
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
    x, y = column(name, x, SAMPLES, columns), column(name, y, LABELS, columns)
    groups = [column(name, group, (), columns) for group in ([groups] if isinstance(groups, str) else groups)]
    options = {"x": x, "y": y, "groups": list(groups), "side": side, "gray": gray, "config": config}
    versions = [f"{split} {getattr(rows, '_fingerprint', len(rows))}" for split, rows in splits.items()]
    return cached(f"hf-{name}", versions, options, lambda: read_splits(name, splits, x, y, groups, side, gray))


def column(name: str, asked: str | None, usual: Sequence[str], columns: Sequence[str]) -> str:
    if asked is not None and asked not in columns:
        raise DataError(f"hf:{name} has no column {asked!r}; {nearest(asked, columns)}")
    found = [asked] if asked is not None else [one for one in usual if one in columns]
    if not found:
        raise DataError(
            f"hf:{name} has none of the columns {', '.join(usual)}: name one of {', '.join(columns)} as x= or y="
        )
    return found[0]


def read_splits(
    name: str, splits: dict[str, Any], x: str, y: str, groups: Sequence[str], side: int | None, gray: bool
) -> Dataset:
    parts, official = [], []
    ids: dict[str, list[Any]] = {group: [] for group in groups}
    for split, rows in splits.items():
        where = f"hf:{name}, {split},"
        parts.append(Part(where, values(rows[x], where, side, gray), np.asarray(rows[y])))
        official += [split == "test"] * len(rows)
        for group in groups:
            ids[group] += list(rows[group])
    images, labels = pool(parts)
    feature = getattr(next(iter(splits.values())), "features", {}).get(y)
    meaning = list(getattr(feature, "names", None) or map(str, range(int(labels.max()) + 1)))
    found = {group: numbered(keys) for group, keys in ids.items()}
    names = {"class": meaning, **{group: called for group, (_, called) in found.items()}}
    numbers = {group: number for group, (number, _) in found.items()}
    tested = torch.tensor(official) if len(splits) > 1 else None
    return Dataset(name, images, labels, len(meaning), tested, numbers, names)


def values(rows: Any, where: str, side: int | None, gray: bool) -> np.ndarray:
    """One array of a column of pictures or numbers."""
    every = [pixels(row, side, gray) if isinstance(row, Image.Image) else np.asarray(row) for row in rows]
    shapes = sorted({row.shape for row in every})
    if len(shapes) > 1:
        raise DataError(f"{where} has samples of mixed shapes, {shapes[0]} and {shapes[1]}: give side= for pictures")
    return np.stack(every)
