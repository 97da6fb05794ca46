"""Digits from three sources."""

import bz2

import numpy as np
import pytest
import torch
from formats import random_images, write_mnist

from sparing.core.errors import DataError
from sparing.data import load_dataset


def write_libsvm(path, x, y):
    """Sparse text: labels from 1, values in [-1, 1]."""
    rows = [
        " ".join([str(label + 1), *(f"{i + 1}:{v}" for i, v in enumerate(row))])
        for row, label in zip(x, y, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bz2.compress("\n".join(rows).encode()))


def write_downloads(here):
    x, _ = write_mnist(here / "mnist")
    usps = random_images(5, (256,), 1)
    write_libsvm(here / "usps" / "usps.bz2", usps[:3] / 127.5 - 1, [0, 9, 5])
    write_libsvm(here / "usps" / "usps.t.bz2", usps[3:] / 127.5 - 1, [1, 2])
    coloured = torch.from_numpy(random_images(3, (28, 28, 3), 2))
    (here / "mnist-m").mkdir()
    torch.save((coloured[:2], torch.tensor([3, 4])), here / "mnist-m" / "mnist_m_train.pt")
    torch.save((coloured[2:], torch.tensor([5])), here / "mnist-m" / "mnist_m_test.pt")
    return x, usps.reshape(-1, 16, 16), coloured


def write_npz(here):
    x, usps, coloured = random_images(10), random_images(5, (16, 16), 1), random_images(3, (28, 28, 3), 2)
    y = np.arange(10)
    np.savez(here / "mnist_writers.npz", x_train=x[:6], y_train=y[:6], x_test=x[6:], y_test=y[6:])
    np.savez(here / "usps.npz", x_train=usps[:3], y_train=[0, 9, 5], x_test=usps[3:], y_test=[1, 2])
    np.savez(here / "mnist_m_sub.npz", x=coloured, y=[3, 4, 5], is_test=[0, 0, 1])
    return x, usps, coloured


@pytest.mark.parametrize("source", [write_downloads, write_npz])
def test_three_domains(here, source):
    x, usps, _ = source(here)
    data = load_dataset("digit-domains")
    assert (data.x.shape, data.x.dtype) == ((18, 3, 32, 32), torch.uint8)
    assert data.y.tolist() == [*range(10), 0, 9, 5, 1, 2, 3, 4, 5]
    assert data.official.tolist() == [0] * 6 + [1] * 4 + [0] * 3 + [1] * 2 + [0] * 2 + [1]
    assert data.groups["domain"].tolist() == [0] * 10 + [1] * 5 + [2] * 3
    assert data.names["domain"] == ["mnist", "usps", "mnist-m"]
    assert torch.equal(data.x[:10, 0], data.x[:10, 2])
    small = load_dataset("digit-domains", side=28, gray=True)
    assert small.x.shape == (18, 1, 28, 28)
    assert np.array_equal(small.x[:10, 0].numpy(), x)
    same = load_dataset("digit-domains", side=16, gray=True).x[10:15, 0].numpy()
    assert np.array_equal(same, usps)


def test_bad_input(here):
    write_downloads(here)
    (here / "usps" / "usps.t.bz2").write_bytes(b"no")
    with pytest.raises(
        DataError, match=r"usps.t.bz2 is cut short or damaged .*fetch it again with: curl .*libsvmtools"
    ):
        load_dataset("digit-domains")
    write_libsvm(here / "usps" / "usps.t.bz2", np.zeros((1, 256)), [10])
    with pytest.raises(DataError, match=r"usps.t.bz2: the label of sample 0 is 10, out of range"):
        load_dataset("digit-domains")
    write_libsvm(here / "usps" / "usps.t.bz2", np.zeros((1, 256)), [1])
    (here / "mnist-m" / "mnist_m_test.pt").write_bytes(b"no")
    with pytest.raises(DataError, match=r"mnist_m_test.pt is not a pair of tensors"):
        load_dataset("digit-domains")
    (here / "mnist-m" / "mnist_m_test.pt").unlink()
    with pytest.raises(DataError, match=r"mnist-m: .*mnist-m lacks mnist_m_test.pt; fetch it with: curl"):
        load_dataset("digit-domains")
