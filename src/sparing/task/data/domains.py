"""Digits from three sources, as three domains: MNIST, USPS and MNIST-M."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.task.data.cache import cached
from sparing.task.data.checks import Part, pool
from sparing.task.data.idx import FILES, MNIST_FETCH, read_idx
from sparing.task.data.images import alike, check_images
from sparing.task.data.npy import read_npz
from sparing.task.data.places import Form, command, curl, find
from sparing.task.data.registry import dataset
from sparing.task.data.torch_files import read_torch_pair
from sparing.task.data.unpacking import content, reading
from sparing.task.dataset import Dataset

MOST_LINES = 20_000  # of a file of USPS
Halves = tuple[Part, Part]
"""The train and the test samples of one domain."""


@dataset("digit-domains")
def digit_domains(side: int = 32, gray: bool = False) -> Dataset:
    """Digits from MNIST, USPS and MNIST-M as three domains, all brought to colour and 32x32

    `gray=True, side=28` gives them in gray, at the size of MNIST.
    """
    found = [(name, *find(name, forms, FETCH[name])) for name, forms in FORMS.items()]
    options = {"side": side, "gray": gray}
    paths = [path for *_, own in found for path in own]
    return cached("digit-domains", paths, options, lambda: read_domains(found, side, gray))


def read_domains(found: Sequence[tuple[str, Form, list[Path]]], side: int, gray: bool) -> Dataset:
    parts, domain, official = [], [], []
    for i, (name, form, paths) in enumerate(found):
        try:
            for test, half in enumerate(form.read(paths)):
                x, y = pool([half], 10)
                parts.append(Part(half.where, alike(check_images(x, half.where).numpy(), side, gray), y.numpy()))
                domain += [i] * len(y)
                official += [bool(test)] * len(y)
        except DataError as error:
            raise DataError(f"digit-domains: {error}; fetch it again with: {command(name, FETCH[name])}") from None
    names = {"class": [*"0123456789"], "domain": [name for name, *_ in found]}
    groups = {"domain": torch.tensor(domain)}
    return Dataset("digit-domains", *pool(parts), 10, torch.tensor(official), groups, names)


def idx_files(paths: list[Path]) -> Halves:
    arrays = [read_idx(path) for path in paths]
    return Part(str(paths[0]), *arrays[:2]), Part(str(paths[2]), *arrays[2:])


def npz_halves(paths: list[Path]) -> Halves:
    x_train, y_train, x_test, y_test = read_npz(paths[0], "x_train", "y_train", "x_test", "y_test")
    return Part(f"{paths[0]}, train", x_train, y_train), Part(f"{paths[0]}, test", x_test, y_test)


def npz_marked(paths: list[Path]) -> Halves:
    """One npz file that marks its test samples."""
    x, y, is_test = read_npz(paths[0], "x", "y", "is_test")
    if is_test.dtype.kind not in "biu" or is_test.ndim != 1 or not x.shape[:1] == y.shape[:1] == is_test.shape:
        raise DataError(f"{paths[0]} has {is_test.shape} marks of {x.shape[:1]} samples: give one 0 or 1 for each")
    test = is_test.astype(bool)
    return Part(f"{paths[0]}, train", x[~test], y[~test]), Part(f"{paths[0]}, test", x[test], y[test])


def libsvm(paths: list[Path]) -> Halves:
    """USPS as LIBSVM's site has it: 256 numbers in [-1, 1], digits numbered from 1."""
    return svm(paths[0]), svm(paths[1])


def svm(path: Path) -> Part:
    from sklearn.datasets import load_svmlight_file  # takes a second to import, so only here

    text = content(path)
    lines = text.count(b"\n") + 1
    if lines > MOST_LINES:
        raise DataError(f"{path} has {lines:,} lines; USPS has 7,291")
    with reading(f"{path} is cut short or damaged"):
        x, y = load_svmlight_file(io.BytesIO(text), n_features=256)[:2]
        images = np.rint((x.toarray().clip(-1, 1) + 1) * 127.5).astype(np.uint8)  # pyright: ignore
    return Part(str(path), images.reshape(-1, 16, 16), y - 1)


def torch_files(paths: list[Path]) -> Halves:
    """MNIST-M as pairs of tensors, images and labels."""
    return Part(str(paths[0]), *read_torch_pair(paths[0])), Part(str(paths[1]), *read_torch_pair(paths[1]))


LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"
MNIST_M = "https://github.com/liyxi/mnist-m/releases/download/data"
TENSORS = ("mnist_m_train.pt", "mnist_m_test.pt")
FORMS = {
    "mnist": (
        Form(FILES, ("mnist", "MNIST/raw"), idx_files),
        Form(("mnist_writers.npz",), ("", "mnist-writers"), npz_halves),
    ),
    "usps": (
        Form(("usps.bz2", "usps.t.bz2"), ("usps", "USPS", ""), libsvm),
        Form(("usps.npz",), ("", "usps"), npz_halves),
    ),
    "mnist-m": (
        Form(TENSORS, ("mnist-m", "MNISTM/processed"), torch_files),
        Form(("mnist_m_sub.npz",), ("", "mnist-m"), npz_marked),
    ),
}
FETCH = {
    "mnist": MNIST_FETCH,
    "usps": curl(LIBSVM, "usps.bz2", "usps.t.bz2"),
    "mnist-m": curl(MNIST_M, *(f"{name}.tar.gz" for name in TENSORS))
    + "".join(f" && tar xzf {{folder}}/{name}.tar.gz -C {{folder}}" for name in TENSORS),
}
