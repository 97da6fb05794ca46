"""MNIST by the person who wrote each digit: the writer ids that QMNIST recovered, or one npz file with them."""

from pathlib import Path

import numpy as np

from sparing.core.errors import DataError
from sparing.data.cache import load_stored
from sparing.data.dataset import Dataset
from sparing.data.files.checksums import check_sample_count, verify_checksum
from sparing.data.files.locations import FileForm, curl_command
from sparing.data.files.npy import read_npz
from sparing.data.files.unpacking import read_unpacked
from sparing.data.pooling import SourcePart, number_keys, official_test_mask, pool_parts
from sparing.data.registry import register_dataset
from sparing.data.sets.mnist import MNIST_FETCH, MNIST_NAMES, array_from_idx, read_idx

_QMNIST_LABEL_FILES = ("qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int")
_WRITER_COLUMN = 2  # column of the writer's id in a QMNIST label; column 0 is the digit


@register_dataset("mnist-writers")
def _load_mnist_writers(check: bool = True) -> Dataset:
    """MNIST by writer: 539 people wrote the training digits, 297 others the test digits"""
    return load_stored("mnist-writers", _WRITERS_FORMS, _WRITERS_FETCH, check=check)


def _read_qmnist(paths: list[Path], check: bool) -> Dataset:
    """MNIST's images with QMNIST's labels; QMNIST's test set starts with MNIST's."""
    images, parts, writers = paths[:4], [], []
    for i, labels in enumerate(paths[4:]):
        data = [read_unpacked(path) for path in images[2 * i : 2 * i + 2]]
        if check:
            for j in (0, 1):
                verify_checksum(f"mnist/{MNIST_NAMES[2 * i + j]}", data[j], str(images[2 * i + j]))
        x, y = (array_from_idx(held, str(path)) for held, path in zip(data, images[2 * i : 2 * i + 2], strict=True))
        if len(x) != len(y):
            raise DataError(f"{images[2 * i]} has {len(x):,} samples but {len(y):,} labels: each needs one")
        rows = read_idx(labels)
        if rows.ndim != 2 or rows.shape[1] <= _WRITER_COLUMN or len(rows) < len(x):
            raise DataError(f"{labels} is wrong-sized: {rows.shape} labels for {len(x):,} images")
        rows = rows[: len(x)]
        if not np.array_equal(rows[:, 0], y):
            at = int((rows[:, 0] != y).nonzero()[0][0])
            raise DataError(
                f"{labels} is not about these images: image {at} is a {y[at]}, the label says {rows[at, 0]}"
            )
        parts.append(SourcePart(str(images[2 * i]), x, y))
        writers.append(rows[:, _WRITER_COLUMN])
    return _dataset_by_writer(parts, writers)


def _read_writers_npz(paths: list[Path], check: bool) -> Dataset:
    parts, writers = [], []
    for half, wanted in (("train", 60_000), ("test", 10_000)):
        x, y, writer = read_npz(paths[0], f"x_{half}", f"y_{half}", f"writer_{half}")
        if not x.shape[:1] == y.shape[:1] == writer.shape or writer.dtype.kind not in "iuU":
            raise DataError(
                f"{paths[0]}, {half}, has {x.shape[:1]} samples, {y.shape[:1]} labels and {writer.shape} writers of "
                f"type {writer.dtype}: each sample needs one label and one writer's number"
            )
        if check:
            check_sample_count(f"{paths[0]}, {half}", len(x), wanted)
        parts.append(SourcePart(f"{paths[0]}, {half}", x, y))
        writers.append(writer)
    return _dataset_by_writer(parts, writers)


def _dataset_by_writer(parts: list[SourcePart], writers: list[np.ndarray]) -> Dataset:
    both = np.intersect1d(writers[0], writers[1])
    if len(both):
        raise DataError(f"writer {both[0]} is in both train and test, but no writer should be")
    ids, names = number_keys(np.concatenate(writers))
    official = official_test_mask(*(len(part.x) for part in parts))
    x, y = pool_parts(parts, 10)
    return Dataset("mnist-writers", x, y, 10, official, {"writer": ids}, {"class": [*"0123456789"], "writer": names})


def _mnist_and_qmnist_files(mnist: str, qmnist: str) -> tuple[str, ...]:
    return tuple(f"{mnist}/{name}[.gz]" for name in MNIST_NAMES) + tuple(
        f"{qmnist}/{name}[.gz]" for name in _QMNIST_LABEL_FILES
    )


_WRITERS_FORMS = (
    FileForm(("mnist_writers.npz",), ("", "mnist-writers"), _read_writers_npz),
    FileForm(_mnist_and_qmnist_files("mnist", "qmnist"), ("",), _read_qmnist),
    FileForm(_mnist_and_qmnist_files("MNIST/raw", "QMNIST/raw"), ("",), _read_qmnist),
)
_WRITERS_FETCH = (
    MNIST_FETCH.replace("{folder}", "{root}/mnist")
    + " && "
    + curl_command(
        "https://raw.githubusercontent.com/facebookresearch/qmnist/master",
        *(f"{name}.gz" for name in _QMNIST_LABEL_FILES),
        folder="{root}/qmnist",
    )
)
