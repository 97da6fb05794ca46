"""EMNIST: handwritten digits and letters, in idx files whose images lie on their side."""

import string
from pathlib import Path

import numpy as np

from sparing.core.errors import DataError, nearest
from sparing.task.data.cache import stored
from sparing.task.data.checks import Part, halves, pool
from sparing.task.data.checksums import count
from sparing.task.data.idx import read_idx
from sparing.task.data.places import Form
from sparing.task.data.registry import dataset
from sparing.task.dataset import Dataset

MERGED = string.digits + string.ascii_uppercase + "abdefghnqrt"
SPLITS = {  # what the labels mean, and how many samples there are
    "balanced": (MERGED, 112_800, 18_800),
    "letters": (string.ascii_lowercase, 124_800, 20_800),
    "byclass": (string.digits + string.ascii_uppercase + string.ascii_lowercase, 697_932, 116_323),
    "bymerge": (MERGED, 697_932, 116_323),
    "digits": (string.digits, 240_000, 40_000),
    "mnist": (string.digits, 60_000, 10_000),
}
FETCH = (
    "curl -fL --create-dirs --output-dir {folder} -O https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip && "
    "unzip -j {folder}/gzip.zip -d {folder}"
)


@dataset("emnist")
def emnist(split: str = "balanced", check: bool = True) -> Dataset:
    """Handwritten digits and letters, 28x28; split: balanced, letters, byclass, bymerge, digits or mnist"""
    if split not in SPLITS:
        raise DataError(f"emnist has no split {split!r}; {nearest(split, SPLITS)}")
    files = tuple(
        f"emnist-{split}-{half}-{kind}-ubyte[.gz]"
        for half in ("train", "test")
        for kind in ("images-idx3", "labels-idx1")
    )
    folders = ("emnist", "emnist/gzip", "EMNIST/raw", "EMNIST/raw/gzip")
    return stored("emnist", [Form(files, folders, read_emnist)], FETCH, split=split, check=check)


def read_emnist(paths: list[Path], split: str, check: bool) -> Dataset:
    meaning, *sizes = SPLITS[split]
    x_train, y_train, x_test, y_test = map(read_idx, paths)
    first = 1 if split == "letters" else 0  # letters are numbered from 1
    parts = []
    for path, x, y, wanted in ((paths[0], x_train, y_train, sizes[0]), (paths[2], x_test, y_test, sizes[1])):
        if check:
            count(str(path), len(x), wanted)
        parts.append(Part(str(path), x.swapaxes(1, 2), y.astype(np.int16) - first))
    pooled = pool(parts, len(meaning))
    return Dataset(
        f"emnist-{split}", *pooled, len(meaning), halves(len(x_train), len(x_test)), names={"class": [*meaning]}
    )
