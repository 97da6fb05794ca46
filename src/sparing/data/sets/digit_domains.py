"""Digits from three sources, as three domains: MNIST, USPS and MNIST-M."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.data.cache import cached_dataset
from sparing.data.dataset import Dataset
from sparing.data.files.images import check_image_batch, resize_images
from sparing.data.files.locations import FileForm, curl_command, fetch_command, find_files
from sparing.data.files.npy import read_npz
from sparing.data.files.torch_files import read_torch_pair
from sparing.data.files.unpacking import damage_as_data_error, read_unpacked
from sparing.data.pooling import SourcePart, pool_parts
from sparing.data.registry import register_dataset
from sparing.data.sets.mnist import MNIST_FETCH, MNIST_FILES, read_idx

_MOST_USPS_LINES = 20_000  # of a file of USPS
_TrainAndTest = tuple[SourcePart, SourcePart]
"""The train and the test samples of one domain."""


@register_dataset("digit-domains")
def _load_digit_domains(side: int = 32, gray: bool = False) -> Dataset:
    """Digits from MNIST, USPS and MNIST-M as three domains, all brought to colour and 32x32

    `gray=True, side=28` gives them in gray, at the size of MNIST.
    """
    found = [(name, *find_files(name, forms, _DOMAIN_FETCH[name])) for name, forms in _DOMAIN_FORMS.items()]
    options = {"side": side, "gray": gray}
    paths = [path for *_, own in found for path in own]
    return cached_dataset("digit-domains", paths, options, lambda: _read_domains(found, side, gray))


def _read_domains(found: Sequence[tuple[str, FileForm, list[Path]]], side: int, gray: bool) -> Dataset:
    parts, domain, official = [], [], []
    for i, (name, form, paths) in enumerate(found):
        try:
            for test, half in enumerate(form.read(paths)):
                x, y = pool_parts([half], 10)
                parts.append(
                    SourcePart(
                        half.where, resize_images(check_image_batch(x, half.where).numpy(), side, gray), y.numpy()
                    )
                )
                domain += [i] * len(y)
                official += [bool(test)] * len(y)
        except DataError as error:
            raise DataError(
                f"digit-domains: {error}; fetch it again with: {fetch_command(name, _DOMAIN_FETCH[name])}"
            ) from None
    names = {"class": [*"0123456789"], "domain": [name for name, *_ in found]}
    groups = {"domain": torch.tensor(domain)}
    return Dataset("digit-domains", *pool_parts(parts), 10, torch.tensor(official), groups, names)


def _read_idx_halves(paths: list[Path]) -> _TrainAndTest:
    arrays = [read_idx(path) for path in paths]
    return SourcePart(str(paths[0]), *arrays[:2]), SourcePart(str(paths[2]), *arrays[2:])


def _read_npz_halves(paths: list[Path]) -> _TrainAndTest:
    x_train, y_train, x_test, y_test = read_npz(paths[0], "x_train", "y_train", "x_test", "y_test")
    return SourcePart(f"{paths[0]}, train", x_train, y_train), SourcePart(f"{paths[0]}, test", x_test, y_test)


def _read_marked_npz(paths: list[Path]) -> _TrainAndTest:
    """One npz file that marks its test samples."""
    x, y, is_test = read_npz(paths[0], "x", "y", "is_test")
    if is_test.dtype.kind not in "biu" or is_test.ndim != 1 or not x.shape[:1] == y.shape[:1] == is_test.shape:
        raise DataError(f"{paths[0]} has {is_test.shape} marks of {x.shape[:1]} samples: give one 0 or 1 for each")
    test = is_test.astype(bool)
    return SourcePart(f"{paths[0]}, train", x[~test], y[~test]), SourcePart(f"{paths[0]}, test", x[test], y[test])


def _read_libsvm_halves(paths: list[Path]) -> _TrainAndTest:
    """USPS as LIBSVM's site has it: 256 numbers in [-1, 1], digits numbered from 1."""
    return _read_libsvm_file(paths[0]), _read_libsvm_file(paths[1])


def _read_libsvm_file(path: Path) -> SourcePart:
    from sklearn.datasets import load_svmlight_file  # takes a second to import, so only here

    text = read_unpacked(path)
    lines = text.count(b"\n") + 1
    if lines > _MOST_USPS_LINES:
        raise DataError(f"{path} has {lines:,} lines; USPS has 7,291")
    with damage_as_data_error(f"{path} is cut short or damaged"):
        x, y = load_svmlight_file(io.BytesIO(text), n_features=256)[:2]
        images = np.rint((x.toarray().clip(-1, 1) + 1) * 127.5).astype(np.uint8)  # pyright: ignore
    return SourcePart(str(path), images.reshape(-1, 16, 16), y - 1)


def _read_torch_halves(paths: list[Path]) -> _TrainAndTest:
    """MNIST-M as pairs of tensors, images and labels."""
    return SourcePart(str(paths[0]), *read_torch_pair(paths[0])), SourcePart(str(paths[1]), *read_torch_pair(paths[1]))


_LIBSVM_URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass"
_MNIST_M_URL = "https://github.com/liyxi/mnist-m/releases/download/data"
_MNIST_M_FILES = ("mnist_m_train.pt", "mnist_m_test.pt")
_DOMAIN_FORMS = {
    "mnist": (
        FileForm(MNIST_FILES, ("mnist", "MNIST/raw"), _read_idx_halves),
        FileForm(("mnist_writers.npz",), ("", "mnist-writers"), _read_npz_halves),
    ),
    "usps": (
        FileForm(("usps.bz2", "usps.t.bz2"), ("usps", "USPS", ""), _read_libsvm_halves),
        FileForm(("usps.npz",), ("", "usps"), _read_npz_halves),
    ),
    "mnist-m": (
        FileForm(_MNIST_M_FILES, ("mnist-m", "MNISTM/processed"), _read_torch_halves),
        FileForm(("mnist_m_sub.npz",), ("", "mnist-m"), _read_marked_npz),
    ),
}
_DOMAIN_FETCH = {
    "mnist": MNIST_FETCH,
    "usps": curl_command(_LIBSVM_URL, "usps.bz2", "usps.t.bz2"),
    "mnist-m": curl_command(_MNIST_M_URL, *(f"{name}.tar.gz" for name in _MNIST_M_FILES))
    + "".join(f" && tar xzf {{folder}}/{name}.tar.gz -C {{folder}}" for name in _MNIST_M_FILES),
}
