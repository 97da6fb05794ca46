"""MNIST by the person who wrote each digit: the writer ids that QMNIST recovered, or one npz file with them."""

from pathlib import Path

import numpy as np

from sparing.core.errors import DataError
from sparing.task.data.cache import stored
from sparing.task.data.checks import Part, halves, numbered, pool
from sparing.task.data.checksums import count, verify
from sparing.task.data.idx import MNIST_FETCH, NAMES, idx, read_idx
from sparing.task.data.npy import read_npz
from sparing.task.data.places import Form, curl
from sparing.task.data.registry import dataset
from sparing.task.data.unpacking import content
from sparing.task.dataset import Dataset

LABELS = ("qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int")
WRITER = 2  # column of the writer's id in a QMNIST label; column 0 is the digit


@dataset("mnist-writers")
def mnist_writers(check: bool = True) -> Dataset:
    """MNIST by writer: 539 people wrote the training digits, 297 others the test digits"""
    return stored("mnist-writers", FORMS, FETCH, check=check)


def read_qmnist(paths: list[Path], check: bool) -> Dataset:
    """MNIST's images with QMNIST's labels; QMNIST's test set starts with MNIST's."""
    images, parts, writers = paths[:4], [], []
    for i, labels in enumerate(paths[4:]):
        data = [content(path) for path in images[2 * i : 2 * i + 2]]
        if check:
            for j in (0, 1):
                verify(f"mnist/{NAMES[2 * i + j]}", data[j], str(images[2 * i + j]))
        x, y = (idx(held, str(path)) for held, path in zip(data, images[2 * i : 2 * i + 2], strict=True))
        if len(x) != len(y):
            raise DataError(f"{images[2 * i]} has {len(x):,} samples but {len(y):,} labels: each needs one")
        rows = read_idx(labels)
        if rows.ndim != 2 or rows.shape[1] <= WRITER or len(rows) < len(x):
            raise DataError(f"{labels} is wrong-sized: {rows.shape} labels for {len(x):,} images")
        rows = rows[: len(x)]
        if not np.array_equal(rows[:, 0], y):
            at = int((rows[:, 0] != y).nonzero()[0][0])
            raise DataError(
                f"{labels} is not about these images: image {at} is a {y[at]}, the label says {rows[at, 0]}"
            )
        parts.append(Part(str(images[2 * i]), x, y))
        writers.append(rows[:, WRITER])
    return by_writer(parts, writers)


def read_writers_npz(paths: list[Path], check: bool) -> Dataset:
    parts, writers = [], []
    for half, wanted in (("train", 60_000), ("test", 10_000)):
        x, y, writer = read_npz(paths[0], f"x_{half}", f"y_{half}", f"writer_{half}")
        if not x.shape[:1] == y.shape[:1] == writer.shape or writer.dtype.kind not in "iuU":
            raise DataError(
                f"{paths[0]}, {half}, has {x.shape[:1]} samples, {y.shape[:1]} labels and {writer.shape} writers of "
                f"type {writer.dtype}: each sample needs one label and one writer's number"
            )
        if check:
            count(f"{paths[0]}, {half}", len(x), wanted)
        parts.append(Part(f"{paths[0]}, {half}", x, y))
        writers.append(writer)
    return by_writer(parts, writers)


def by_writer(parts: list[Part], writers: list[np.ndarray]) -> Dataset:
    both = np.intersect1d(writers[0], writers[1])
    if len(both):
        raise DataError(f"writer {both[0]} is in both train and test, but no writer should be")
    ids, names = numbered(np.concatenate(writers))
    official = halves(*(len(part.x) for part in parts))
    x, y = pool(parts, 10)
    return Dataset("mnist-writers", x, y, 10, official, {"writer": ids}, {"class": [*"0123456789"], "writer": names})


def beside(mnist: str, qmnist: str) -> tuple[str, ...]:
    return tuple(f"{mnist}/{name}[.gz]" for name in NAMES) + tuple(f"{qmnist}/{name}[.gz]" for name in LABELS)


FORMS = (
    Form(("mnist_writers.npz",), ("", "mnist-writers"), read_writers_npz),
    Form(beside("mnist", "qmnist"), ("",), read_qmnist),
    Form(beside("MNIST/raw", "QMNIST/raw"), ("",), read_qmnist),
)
FETCH = (
    MNIST_FETCH.replace("{folder}", "{root}/mnist")
    + " && "
    + curl(
        "https://raw.githubusercontent.com/facebookresearch/qmnist/master",
        *(f"{name}.gz" for name in LABELS),
        folder="{root}/qmnist",
    )
)
