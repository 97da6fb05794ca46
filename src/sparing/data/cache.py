"""Datasets decoded once, then memory-mapped."""

import hashlib
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparing.core.errors import DataError
from sparing.data.dataset import Dataset
from sparing.data.files.locations import FileForm, cache_folder, fetch_command, find_files
from sparing.data.files.npy import map_npy
from sparing.data.files.unpacking import PARSER_ERRORS
from sparing.data.inputs import Inputs
from sparing.data.pooling import check_consistent, check_trainable

_CACHE_FORMAT = 1  # raise it when a decoder changes what it gives, and every cache is made anew


def load_stored(name: str, forms: Sequence[FileForm], fetch: str, **options: Any) -> Dataset:
    """The dataset from the first of its forms that is here, decoded with these options."""
    form, paths = find_files(name, forms, fetch)
    try:
        return cached_dataset(name, paths, options, lambda: form.read(paths, **options))
    except DataError as error:
        raise DataError(f"{error}; fetch it again with: {fetch_command(name, fetch)}") from None


def cached_dataset(
    name: str, sources: Iterable[Path | str], options: Mapping[str, Any], decode: Callable[[], Dataset]
) -> Dataset:
    """What `decode` gives, from the cache where these sources were decoded before and have not changed since.

    A source is a file or a folder, known by path, size and time of change, or a text that says which version it is.
    """
    sources = list(sources)
    called = re.sub(r"[^a-z0-9-]+", "-", name.lower())[-40:]
    asked = _short_hash([name, sorted(options.items()), [str(source) for source in sources]])
    version = _short_hash([_CACHE_FORMAT, *map(_source_fingerprint, sources)])
    place = cache_folder() / "decoded" / f"{called}-{asked}-{version}"
    kept = open_cached(place)
    if kept is None:
        fresh = check_trainable(decode())
        kept = write_cached(fresh, place, asked) or fresh
    return kept


def _short_hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:16]


def _source_fingerprint(source: Path | str) -> list[Any]:
    """What changes when the source does."""
    if isinstance(source, str):
        return [source]
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def open_cached(place: Path) -> Dataset | None:
    """A kept dataset; None where there is none, or not a whole one."""
    try:
        about = json.loads((place / "about.json").read_text(encoding="utf-8"))
        arrays = {str(name): _mapped_tensor(place / file) for name, file in about["arrays"].items()}
        groups = {name.removeprefix("group "): ids for name, ids in arrays.items() if name.startswith("group ")}
        inputs = about.get("inputs")
        x = Inputs(tuple(arrays[f"x {name}"] for name in inputs), tuple(inputs)) if inputs else arrays["x"]
        official, vocabulary = arrays.get("official"), about.get("vocabulary")
        kept = Dataset(about["name"], x, arrays["y"], about["classes"], official, groups, about["names"], vocabulary)
        return check_consistent(kept)
    except (DataError, *PARSER_ERRORS):
        return None


def _mapped_tensor(file: Path) -> Tensor:
    return torch.from_numpy(map_npy(file))


def write_cached(dataset: Dataset, place: Path, asked: str) -> Dataset | None:
    """Write a dataset so that no reader ever sees half of it, and drop what older sources left."""
    x, groups = dataset.x, {f"group {name}": ids for name, ids in dataset.groups.items()}
    several = dict(zip(x.names or (), x.tensors, strict=True)) if isinstance(x, Inputs) else {}
    arrays = {f"x {name}": one for name, one in several.items()} if isinstance(x, Inputs) else {"x": x}
    arrays |= {"y": dataset.y, **groups}
    if dataset.official is not None:
        arrays["official"] = dataset.official
    files = {name: f"{i}.npy" for i, name in enumerate(arrays)}
    about = {"name": dataset.name, "classes": dataset.classes, "names": dataset.names, "arrays": files}
    about |= {"inputs": list(several), "vocabulary": dataset.vocabulary}
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        for old in place.parent.glob(f"*-{asked}-*"):
            shutil.rmtree(old, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".writing-") as folder:
            draft = Path(folder) / "draft"
            draft.mkdir()
            for name, values in arrays.items():
                np.save(draft / files[name], values.numpy())
            (draft / "about.json").write_text(json.dumps(about), encoding="utf-8")
            if not place.exists():  # another process may have been faster
                os.rename(draft, place)
    except OSError as error:
        warnings.warn(f"{dataset.name} is decoded anew each time: cannot write {place} ({error})", stacklevel=2)
    return open_cached(place)
