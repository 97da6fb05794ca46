"""A few classes per client."""

import heapq
from typing import Any

import numpy as np

from sparing.core.errors import ConfigError
from sparing.split.dealing import (
    ClientParts,
    check_labels,
    parts_from_owners,
    random_order,
    samples_by_class,
    split_generator,
)


def pathological_split(labels: Any, clients: int, classes: int, seed: int) -> ClientParts:
    """Every client holds exactly `classes` classes; a class is divided evenly among those who hold it.

    Large classes have more holders than small ones, so that clients come out about equally large.

    >>> labels = np.arange(60) % 6
    >>> [len(np.unique(labels[part])) for part in pathological_split(labels, clients=4, classes=2, seed=0)]
    [2, 2, 2, 2]
    """
    if classes < 1:
        raise ConfigError(f"pathological needs at least one class per client, seen {classes}")
    labels = check_labels(labels, clients, least=classes)
    members = samples_by_class(labels)
    holders = _holders_per_class(np.array([len(part) for part in members.values()]), clients, classes)
    rng = split_generator(seed, "pathological")
    holds = _classes_per_client(holders, clients, classes, rng)
    owner = np.empty(len(labels), np.int64)
    for k, part in enumerate(members.values()):
        mine = np.flatnonzero((holds == k).any(1))
        mine = mine[random_order(len(mine), rng)]
        owner[part[random_order(len(part), rng)]] = mine[np.arange(len(part)) * len(mine) // len(part)]
    return parts_from_owners(owner, clients)


def _holders_per_class(sizes: np.ndarray, clients: int, classes: int) -> np.ndarray:
    """Holders per class, one at least: whichever class is in the largest pieces gets the next one."""
    if classes > len(sizes):
        raise ConfigError(f"pathological asks for {classes} classes per client, but there are {len(sizes)}: ask fewer")
    if clients * classes < len(sizes):
        raise ConfigError(
            f"{clients} clients with {classes} classes each hold {clients * classes} of {len(sizes)} classes: "
            "take more clients or more classes per client"
        )
    if clients * classes > np.minimum(sizes, clients).sum():
        raise ConfigError(
            f"{clients} clients cannot have {classes} classes each: the smallest class has {sizes.min()} samples, "
            "take fewer clients or classes"
        )
    holders = np.ones(len(sizes), np.int64)
    most = np.minimum(sizes, clients).tolist()
    piece = [(-float(n), k) for k, n in enumerate(sizes.tolist()) if most[k] > 1]
    heapq.heapify(piece)
    for _ in range(clients * classes - len(sizes)):
        _, k = heapq.heappop(piece)
        holders[k] += 1
        if holders[k] < most[k]:
            heapq.heappush(piece, (-float(sizes[k] / holders[k]), k))
    return holders


def _classes_per_client(holders: np.ndarray, clients: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """`[clients, classes]` different class numbers in each row, class k in exactly `holders[k]` rows.

    Each client takes the classes that still lack most holders, at random among equals: this always works out.
    """
    missing = holders.astype(np.float64)
    holds = np.empty((clients, classes), np.int64)
    for i in range(clients):
        holds[i] = np.argsort(rng.random(len(missing)) - missing, kind="stable")[:classes]
        missing[holds[i]] -= 1
    return holds
