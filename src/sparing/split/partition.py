"""A dataset and a law, turned into who trains and tests on which samples."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from sparing.core.errors import ConfigError
from sparing.data.dataset import Dataset
from sparing.data.inputs import samples_in_words
from sparing.split.dealing import ClientParts, parts_from_owners, random_order, split_generator
from sparing.split.index_lists import read_index_lists
from sparing.split.labels import iid_split
from sparing.split.laws import SPLIT_LAWS, read_split, split_in_words
from sparing.split.natural_ids import choose_natural_ids, owner_by_id
from sparing.split.styles import Style, client_styles
from sparing.split.train_test import check_split_share, cut_stratified, deal_in_proportion, split_train_test


@dataclass(frozen=True, eq=False)
class DatasetPartition:
    """Sample numbers per client. A sample is in one list at most; `left_out` are those in none.

    Clients in `held_out` never train: their train samples are there for a model that adapts to a newcomer.
    """

    train: ClientParts
    test: ClientParts
    validation: ClientParts
    law: str = ""  # in words
    held_out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    names: list[str] | None = None
    shifts: list[Style] | None = None  # a style per client: split/styles.py applies it
    global_test: np.ndarray | None = None  # an official test part of no client; None: all clients' tests together
    left_out: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    probe: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # kept by the server

    def __len__(self) -> int:
        """How many clients there are."""
        return len(self.train)


class _Dealt(NamedTuple):
    """What a law gives: everything a client owns, or its train samples where its test samples are known."""

    own: ClientParts
    test: ClientParts | None = None
    validation: ClientParts | None = None
    names: list[str] | None = None
    shifts: list[Style] | None = None


def partition_dataset(
    dataset: Dataset,
    split: str | Mapping[str, Any],
    clients: int | None,
    seed: int,
    test: float = 0.25,
    validation: float = 0.0,
    held_out: int | float = 0,
    probe: int | float = 0,
) -> DatasetPartition:
    """Share a dataset out to clients; docs/splits.md has the laws.

    The clients share the official train part, and the official test part is dealt out by the same law. Where there is
    none, or its natural ids are others (unseen writers), a stratified share `test` of each client's own samples is
    kept for testing. `validation` is then a share of what is left to train on. `held_out` clients, a number or a
    share of all, never train. `probe` samples, a number or a share of the train part, are taken out before anything is
    shared, in the same class proportions: the server keeps them.

    >>> import torch
    >>> pool = Dataset("toy", torch.zeros(40, 1), torch.arange(40) % 4, classes=4)
    >>> parts = partition_dataset(pool, {"pathological": 2}, clients=4, seed=0)
    >>> [len(np.unique(pool.y[part])) for part in parts.train], [len(part) for part in parts.train]
    ([2, 2, 2, 2], [7, 8, 8, 8])
    """
    check_split_share("test", test)
    check_split_share("validation", validation)
    if seed < 0:
        raise ConfigError(f"the seed must be 0 or more, seen {seed}")
    name, options = read_split(split, dataset)
    labels, official = dataset_labels(dataset), _official_mask(dataset)
    kept = _draw_probe(probe, labels, official, name, seed)
    dealt = _deal_samples(dataset, labels, official, kept, name, options, clients, seed)
    train, tests = (dealt.own, dealt.test) if dealt.test else split_train_test(labels, dealt.own, seed, test)
    aside = dealt.validation or [np.empty(0, np.int64)] * len(train)
    if validation and not dealt.validation:
        train, aside = cut_stratified(labels, train, validation, split_generator(seed, "validation"))
    nobody = np.ones(len(labels), bool)
    nobody[np.concatenate([*train, *tests, *aside, kept])] = False
    unseen = None if dealt.test else np.flatnonzero(official & nobody)
    if unseen is not None:
        nobody[unseen] = False
    return DatasetPartition(
        train,
        tests,
        aside,
        law=split_in_words(name, options),
        held_out=draw_held_out(held_out, len(train), seed),
        names=dealt.names,
        shifts=dealt.shifts,
        global_test=unseen if unseen is not None and len(unseen) else None,
        left_out=np.flatnonzero(nobody),
        probe=kept,
    )


def _deal_samples(
    dataset: Dataset,
    labels: np.ndarray,
    official: np.ndarray,
    kept: np.ndarray,
    name: str,
    options: dict[str, Any],
    clients: int | None,
    seed: int,
) -> _Dealt:
    if name == "lists":
        return _deal_from_lists(read_index_lists(options["lists"], len(labels)), labels, official, clients, seed)
    shared = ~official
    shared[kept] = False
    if name in dataset.groups:
        return _deal_by_group(dataset, official, shared, name, options, clients, seed)
    if clients is None:
        raise ConfigError(f"{name} needs a number of clients: set clients")
    if name == "styles" and not (isinstance(dataset.x, Tensor) and dataset.x.ndim == 4):
        raise ConfigError(f"styles need images, but {dataset.name} has {samples_in_words(dataset.x)}")
    pool = np.flatnonzero(shared)
    if name == "styles":
        shifts = client_styles(clients, seed, **options)
        dealt = _Dealt(iid_split(labels[pool], clients, seed), names=[str(shift) for shift in shifts], shifts=shifts)
    else:
        dealt = _Dealt(SPLIT_LAWS[name](labels[pool], clients=clients, seed=seed, **options))
    dealt = dealt._replace(own=[pool[part] for part in dealt.own])
    return _with_official_test(dealt, labels, official, seed)


def _with_official_test(dealt: _Dealt, labels: np.ndarray, official: np.ndarray, seed: int) -> _Dealt:
    """Official test samples dealt out in the same class proportions."""
    exam = np.flatnonzero(official)
    if not len(exam):
        return dealt
    return dealt._replace(test=[exam[part] for part in deal_in_proportion(labels, dealt.own, labels[exam], seed)])


def _deal_by_group(
    dataset: Dataset,
    official: np.ndarray,
    shared: np.ndarray,
    name: str,
    options: dict[str, Any],
    clients: int | None,
    seed: int,
) -> _Dealt:
    """One client per natural id. Official test samples go by the same ids, if every client has some."""
    ids = dataset.groups[name].numpy()
    chosen = choose_natural_ids(ids[shared], clients, seed, what=name, **options)
    owner = owner_by_id(ids, chosen)
    known = dataset.names.get(name)
    names = [known[i] if known and i < len(known) else f"{name} {i}" for i in chosen.tolist()]
    own = parts_from_owners(np.where(shared, owner, -1), len(chosen))
    test = parts_from_owners(np.where(official, owner, -1), len(chosen))
    return _Dealt(own, test if all(map(len, test)) else None, names=names)


def _deal_from_lists(
    lists: dict[str, ClientParts], labels: np.ndarray, official: np.ndarray, clients: int | None, seed: int
) -> _Dealt:
    """Lists that tell train from test are taken as they are; official test samples in a plain list are for testing."""
    own = lists["all"] if "all" in lists else lists["train"]
    if clients not in (None, len(own)):
        raise ConfigError(f"there are {len(own)} index lists but clients is {clients}: leave clients out")
    dealt = _Dealt(own, lists.get("test"), lists.get("validation"))
    if dealt.test:
        return dealt
    if not official[np.concatenate(own)].any():
        return _with_official_test(dealt, labels, official, seed)
    for client, part in enumerate(own):
        if official[part].all():
            raise ConfigError(f"client {client} lists official test samples only: give it some to train on")
    return dealt._replace(own=[part[~official[part]] for part in own], test=[part[official[part]] for part in own])


def draw_held_out(held_out: int | float, clients: int, seed: int) -> np.ndarray:
    """Ids of the clients that never train, ascending."""
    if isinstance(held_out, float):
        check_split_share("held-out", held_out)
    count = round(held_out * clients) if isinstance(held_out, float) else held_out
    if not 0 <= count < clients:
        raise ConfigError(f"{count} of {clients} clients cannot be held out: leave at least one to train")
    return np.sort(random_order(clients, split_generator(seed, "held out"))[:count])


def _draw_probe(probe: int | float, labels: np.ndarray, official: np.ndarray, name: str, seed: int) -> np.ndarray:
    """The server's samples: a stratified part of what is not for testing."""
    if not probe:
        return np.empty(0, np.int64)
    if name == "lists":
        raise ConfigError(f"probe is {probe}, but lists say who holds what: leave it out or split in another way")
    pool = np.flatnonzero(~official)
    if isinstance(probe, int) and not 0 < probe < len(pool):
        raise ConfigError(f"probe is {probe:,}, but there are {len(pool):,} training samples in all: take some of them")
    share = probe if isinstance(probe, float) else probe / len(pool)
    check_split_share("probe", share)
    kept = cut_stratified(labels, [pool], share, split_generator(seed, "probe"))[1][0]
    if not len(kept):
        raise ConfigError(f"probe is {probe} of {len(pool):,} samples, which is none: raise it")
    return kept


def dataset_labels(dataset: Dataset) -> np.ndarray:
    """One label per sample; for text, the last token to be predicted, or 0 where nothing is at the last place."""
    y = dataset.y if dataset.y.ndim == 1 else dataset.y.flatten(1)[:, -1].clamp(min=0)
    return y.numpy()


def _official_mask(dataset: Dataset) -> np.ndarray:
    return np.zeros(len(dataset), bool) if dataset.official is None else dataset.official.numpy()
