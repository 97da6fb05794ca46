"""EMNIST: handwritten digits and letters, in idx files whose images lie on their side."""

import string
from pathlib import Path

import numpy as np

from sparing.core.errors import DataError, nearest_name
from sparing.data.cache import load_stored
from sparing.data.dataset import Dataset
from sparing.data.files.checksums import check_sample_count
from sparing.data.files.locations import FileForm
from sparing.data.pooling import SourcePart, official_test_mask, pool_parts
from sparing.data.registry import register_dataset
from sparing.data.sets.mnist import read_idx

_MERGED_CLASSES = string.digits + string.ascii_uppercase + "abdefghnqrt"
_EMNIST_SPLITS = {  # what the labels mean, and how many samples there are
    "balanced": (_MERGED_CLASSES, 112_800, 18_800),
    "letters": (string.ascii_lowercase, 124_800, 20_800),
    "byclass": (string.digits + string.ascii_uppercase + string.ascii_lowercase, 697_932, 116_323),
    "bymerge": (_MERGED_CLASSES, 697_932, 116_323),
    "digits": (string.digits, 240_000, 40_000),
    "mnist": (string.digits, 60_000, 10_000),
}
_EMNIST_FETCH = (
    "curl -fL --create-dirs --output-dir {folder} -O https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip && "
    "unzip -j {folder}/gzip.zip -d {folder}"
)


@register_dataset("emnist")
def _load_emnist(split: str = "balanced", check: bool = True) -> Dataset:
    """Handwritten digits and letters, 28x28; split: balanced, letters, byclass, bymerge, digits or mnist"""
    if split not in _EMNIST_SPLITS:
        raise DataError(f"emnist has no split {split!r}; {nearest_name(split, _EMNIST_SPLITS)}")
    files = tuple(
        f"emnist-{split}-{half}-{kind}-ubyte[.gz]"
        for half in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    )
    folders = ("emnist", "emnist/gzip", "EMNIST/raw", "EMNIST/raw/gzip")
    return load_stored("emnist", [FileForm(files, folders, _read_emnist)], _EMNIST_FETCH, split=split, check=check)


def _read_emnist(paths: list[Path], split: str, check: bool) -> Dataset:
    meaning, *sizes = _EMNIST_SPLITS[split]
    x_train, y_train, x_test, y_test = map(read_idx, paths)
    first = 1 if split == "letters" else 0  # letters are numbered from 1
    parts = []
    for path, x, y, wanted in ((paths[0], x_train, y_train, sizes[0]), (paths[2], x_test, y_test, sizes[1])):
        if check:
            check_sample_count(str(path), len(x), wanted)
        parts.append(SourcePart(str(path), x.swapaxes(1, 2), y.astype(np.int16) - first))
    pooled = pool_parts(parts, len(meaning))
    return Dataset(
        f"emnist-{split}",
        *pooled,
        len(meaning),
        official_test_mask(len(x_train), len(x_test)),
        names={"class": [*meaning]},
    )
