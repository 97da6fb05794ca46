"""Pictures in folders `domain/class/file`, and Office-Caltech-10 in them."""

from pathlib import Path

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.data.cache import cached_dataset, load_stored
from sparing.data.dataset import Dataset
from sparing.data.files.images import IMAGE_ENDINGS, check_image_batch, read_image, resize_images
from sparing.data.files.locations import FileForm, find_user_folder
from sparing.data.files.npy import read_npz
from sparing.data.pooling import SourcePart, natural_sort_key, pool_parts
from sparing.data.registry import register_dataset

_OFFICE_DOMAINS = ("amazon", "caltech", "dslr", "webcam")
_OFFICE_FETCH = (
    "curl -fL --create-dirs --output-dir {root} -O "
    "https://huggingface.co/datasets/Jemary/FedBN_Dataset/resolve/main/office_caltech_10_dataset.zip && "
    "unzip {root}/office_caltech_10_dataset.zip -d {root}"
)


@register_dataset("folder:PATH")
def _load_image_folders(path: str, side: int | None = 32, gray: bool = False) -> Dataset:
    """Your own pictures in folders domain/class/file, all squeezed to side x side pixels

    `side=None` keeps their size; then they must all have the same.
    """
    root = find_user_folder("folder", path)
    options = {"side": side, "gray": gray}
    return cached_dataset(
        f"folder-{root.name}", [root], options, lambda: _read_image_folders(root.name, root, [root], side, gray)
    )


@register_dataset("office-caltech10")
def _load_office_caltech10(side: int = 32) -> Dataset:
    """2,533 pictures of 10 kinds of things from 4 domains: amazon, caltech, dslr, webcam; squeezed to side x side"""
    return load_stored("office-caltech10", _OFFICE_FORMS, _OFFICE_FETCH, side=side)


def _read_office_folders(paths: list[Path], side: int) -> Dataset:
    return _read_image_folders("office-caltech10", paths[0].parent, paths, side, gray=False)


def _read_office_npz(paths: list[Path], side: int) -> Dataset:
    x, y, domain, classes, domains = read_npz(paths[0], "x", "y", "domain", "classes", "domains")
    for what, called in (("classes", classes), ("domains", domains)):
        if called.dtype.kind != "U" or called.ndim != 1:
            raise DataError(
                f"{paths[0]} has {what} of type {called.dtype} and shape {called.shape}: give a list of names"
            )
    images, labels = pool_parts([SourcePart(str(paths[0]), x, y)], len(classes))
    if domain.dtype.kind not in "iu" or domain.shape != labels.shape:
        raise DataError(f"{paths[0]} has domains of shape {domain.shape}: give one whole number for each sample")
    if not 0 <= domain.min() <= domain.max() < len(domains):
        raise DataError(f"{paths[0]} has domain {domain.max()} but only {len(domains)} names")
    names = {"class": classes.tolist(), "domain": domains.tolist()}
    images = torch.from_numpy(resize_images(check_image_batch(images, str(paths[0])).numpy(), side, gray=False))
    ids = torch.from_numpy(domain.astype(np.int64))
    return Dataset("office-caltech10", images, labels, len(classes), None, {"domain": ids}, names)


_OFFICE_FORMS = (
    FileForm(_OFFICE_DOMAINS, ("office_caltech_10", "office-caltech10"), _read_office_folders),
    FileForm(("office_caltech10_32.npz",), ("", "office-caltech10"), _read_office_npz),
)


def _read_image_folders(name: str, root: Path, within: list[Path], side: int | None, gray: bool) -> Dataset:
    files = sorted(
        (path for folder in within for path in _image_files(folder, root)), key=lambda path: natural_sort_key(str(path))
    )
    if not files:
        raise DataError(f"{root} holds no pictures: put them in folders domain/class/file, such as photos/cat/1.png")
    keys = [file.relative_to(root).parts for file in files]
    groups = [sorted({key[level] for key in keys}, key=natural_sort_key) for level in (0, 1)]
    domain, label = (torch.tensor([groups[level].index(key[level]) for key in keys]) for level in (0, 1))
    first = read_image(files[0], side, gray)
    x = np.empty((len(files), *first.shape), np.uint8)
    for i, file in enumerate(files):
        image = read_image(file, side, gray)
        if image.shape != first.shape:
            raise DataError(
                f"mixed image shapes: {file} is {image.shape[2]}x{image.shape[1]} but {files[0]} is "
                f"{first.shape[2]}x{first.shape[1]}: give a side to squeeze them all to, such as side=32"
            )
        x[i] = image
    names = {"class": groups[1], "domain": groups[0]}
    return Dataset(name, torch.from_numpy(x), label, len(groups[1]), None, {"domain": domain}, names)


def _image_files(folder: Path, root: Path) -> list[Path]:
    """The pictures in a folder; one that lies too high or too deep would be lost, so it is refused."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(root).parts
        if path.suffix.lower() not in IMAGE_ENDINGS or any(part.startswith(".") for part in parts):
            continue
        if len(parts) != 3:
            raise DataError(f"{path} is not in a folder domain/class below {root}: move it into one")
        found.append(path)
    return found
