"""MNIST by writer, from QMNIST's labels and from one npz file."""

import numpy as np
import pytest
from formats import idx_bytes, random_images, write, write_mnist

from sparing.core.errors import DataError
from sparing.data import load_dataset

WRITERS = np.array([30, 30, 7, 7, 7, 30, 100, 8, 8, 100])


def write_qmnist(folder, y, writers=WRITERS, train=6):
    """Eight numbers a digit; the test file goes on after MNIST's test set, as the real one does."""
    rows = np.zeros((len(y) + 3, 8), np.int32)
    rows[: len(y), 0], rows[: len(y), 2] = y, writers
    write(folder / "qmnist-train-labels-idx2-int", idx_bytes(rows[:train]))
    write(folder / "qmnist-test-labels-idx2-int", idx_bytes(rows[train:]))


def write_npz(path, **changed):
    x, y = random_images(10), np.arange(10) % 10
    arrays = {"x_train": x[:6], "y_train": y[:6], "writer_train": WRITERS[:6]}
    arrays |= {"x_test": x[6:], "y_test": y[6:], "writer_test": WRITERS[6:]}
    np.savez(path, **{key: value for key, value in (arrays | changed).items() if value is not None})
    return x, y


def by_qmnist(here):
    x, y = write_mnist(here / "mnist")
    write_qmnist(here / "qmnist", y)
    return x, y


@pytest.mark.parametrize("source", [by_qmnist, lambda here: write_npz(here / "mnist_writers.npz")])
def test_writers(here, source):
    x, y = source(here)
    data = load_dataset("mnist-writers", check=False)
    assert np.array_equal(data.x[:, 0].numpy(), x)
    assert data.y.tolist() == y.tolist()
    assert data.official.tolist() == [False] * 6 + [True] * 4
    assert data.names["writer"] == ["7", "8", "30", "100"]
    assert data.groups["writer"].tolist() == [2, 2, 0, 0, 0, 2, 3, 1, 1, 3]


def test_bad_input(here):
    _, y = write_mnist(here / "mnist")
    with pytest.raises(
        DataError, match=r"lacks qmnist/qmnist-train-labels-idx2-int\[.gz\], qmnist/qmnist-test.*curl.*qmnist"
    ):
        load_dataset("mnist-writers", check=False)
    write_qmnist(here / "qmnist", np.roll(y, 1))
    with pytest.raises(DataError, match=r"is not about these images: image 0 is a 0, the label says 9"):
        load_dataset("mnist-writers", check=False)
    write_qmnist(here / "qmnist", y, train=5)
    with pytest.raises(DataError, match=r"wrong-sized: \(5, 8\) labels for 6 images"):
        load_dataset("mnist-writers", check=False)
    write_qmnist(here / "qmnist", y, writers=np.ones(10))
    with pytest.raises(DataError, match=r"writer 1 is in both train and test"):
        load_dataset("mnist-writers", check=False)
    with pytest.raises(DataError, match=r"is not the official mnist/train-images-idx3-ubyte"):
        load_dataset("mnist-writers")
    write_npz(here / "mnist_writers.npz", writer_test=None)
    with pytest.raises(DataError, match=r"mnist_writers.npz has no array 'writer_test' \(it has x_train, "):
        load_dataset("mnist-writers", check=False)
    write_npz(here / "mnist_writers.npz")
    with pytest.raises(DataError, match=r"npz, train is wrong-sized: it holds 6 samples, the official one 60,000"):
        load_dataset("mnist-writers")
    (here / "mnist_writers.npz").write_bytes(b"PK no")
    with pytest.raises(DataError, match=r"mnist_writers.npz is cut short, damaged or no npz file"):
        load_dataset("mnist-writers")
