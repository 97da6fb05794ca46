"""Pictures in folders `domain/class/file`, and Office-Caltech-10 in them."""

from pathlib import Path

import numpy as np
import torch

from sparing.core.errors import DataError
from sparing.task.data.cache import cached, stored
from sparing.task.data.checks import Part, natural, pool
from sparing.task.data.images import ENDINGS, alike, check_images, read_image
from sparing.task.data.npy import read_npz
from sparing.task.data.places import Form, own_folder
from sparing.task.data.registry import dataset
from sparing.task.dataset import Dataset

DOMAINS = ("amazon", "caltech", "dslr", "webcam")
FETCH = (
    "curl -fL --create-dirs --output-dir {root} -O "
    "https://huggingface.co/datasets/Jemary/FedBN_Dataset/resolve/main/office_caltech_10_dataset.zip && "
    "unzip {root}/office_caltech_10_dataset.zip -d {root}"
)


@dataset("folder:PATH")
def folder(path: str, side: int | None = 32, gray: bool = False) -> Dataset:
    """Your own pictures in folders domain/class/file, all squeezed to side x side pixels

    `side=None` keeps their size; then they must all have the same.
    """
    root = own_folder("folder", path)
    options = {"side": side, "gray": gray}
    return cached(f"folder-{root.name}", [root], options, lambda: read_folders(root.name, root, [root], side, gray))


@dataset("office-caltech10")
def office_caltech10(side: int = 32) -> Dataset:
    """2,533 pictures of 10 kinds of things from 4 domains: amazon, caltech, dslr, webcam; squeezed to side x side"""
    return stored("office-caltech10", OFFICE, FETCH, side=side)


def read_office_folders(paths: list[Path], side: int) -> Dataset:
    return read_folders("office-caltech10", paths[0].parent, paths, side, gray=False)


def read_office_npz(paths: list[Path], side: int) -> Dataset:
    x, y, domain, classes, domains = read_npz(paths[0], "x", "y", "domain", "classes", "domains")
    for what, called in (("classes", classes), ("domains", domains)):
        if called.dtype.kind != "U" or called.ndim != 1:
            raise DataError(
                f"{paths[0]} has {what} of type {called.dtype} and shape {called.shape}: give a list of names"
            )
    images, labels = pool([Part(str(paths[0]), x, y)], len(classes))
    if domain.dtype.kind not in "iu" or domain.shape != labels.shape:
        raise DataError(f"{paths[0]} has domains of shape {domain.shape}: give one whole number for each sample")
    if not 0 <= domain.min() <= domain.max() < len(domains):
        raise DataError(f"{paths[0]} has domain {domain.max()} but only {len(domains)} names")
    names = {"class": classes.tolist(), "domain": domains.tolist()}
    images = torch.from_numpy(alike(check_images(images, str(paths[0])).numpy(), side, gray=False))
    ids = torch.from_numpy(domain.astype(np.int64))
    return Dataset("office-caltech10", images, labels, len(classes), None, {"domain": ids}, names)


OFFICE = (
    Form(DOMAINS, ("office_caltech_10", "office-caltech10"), read_office_folders),
    Form(("office_caltech10_32.npz",), ("", "office-caltech10"), read_office_npz),
)


def read_folders(name: str, root: Path, within: list[Path], side: int | None, gray: bool) -> Dataset:
    files = sorted((path for folder in within for path in pictures(folder, root)), key=lambda path: natural(str(path)))
    if not files:
        raise DataError(f"{root} holds no pictures: put them in folders domain/class/file, such as photos/cat/1.png")
    keys = [file.relative_to(root).parts for file in files]
    groups = [sorted({key[level] for key in keys}, key=natural) for level in (0, 1)]
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


def pictures(folder: Path, root: Path) -> list[Path]:
    """The pictures in a folder; one that lies too high or too deep would be lost, so it is refused."""
    found = []
    for path in folder.rglob("*"):
        parts = path.relative_to(root).parts
        if path.suffix.lower() not in ENDINGS or any(part.startswith(".") for part in parts):
            continue
        if len(parts) != 3:
            raise DataError(f"{path} is not in a folder domain/class below {root}: move it into one")
        found.append(path)
    return found
