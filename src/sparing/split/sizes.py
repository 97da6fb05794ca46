"""Size skew, alone and together with label skew."""

from typing import Any

import numpy as np

from sparing.core.errors import ConfigError
from sparing.split.dealing import (
    ClientParts,
    apportion,
    check_labels,
    parts_from_owners,
    random_order,
    samples_by_class,
    split_generator,
)
from sparing.split.labels import check_alpha


def quantity_split(labels: Any, clients: int, a: float, seed: int, least: int = 1) -> ClientParts:
    """Size skew: client k = 1, 2, ... has a share of samples proportional to k^-a; labels are dealt at random.

    >>> [len(part) for part in quantity_split(np.zeros(100), clients=4, a=1.0, seed=0)]
    [48, 24, 16, 12]
    """
    labels = check_labels(labels, clients, least)
    sizes = _power_law_sizes(len(labels), clients, a, least)
    owner = np.empty(len(labels), np.int64)
    owner[random_order(len(labels), split_generator(seed, "quantity"))] = np.repeat(np.arange(clients), sizes)
    return parts_from_owners(owner, clients)


def label_quantity_split(labels: Any, clients: int, alpha: float, a: float, seed: int, least: int = 1) -> ClientParts:
    """Both skews: client k has a share of samples proportional to k^-a, its labels lean to Dirichlet(alpha).

    The wishes n_k p_kc are balanced against what there is of each class; where a class is still asked for too often,
    random clients among those who asked take what is left over of others. Sizes come out exactly.

    >>> labels = np.arange(100) % 5
    >>> [len(part) for part in label_quantity_split(labels, clients=4, alpha=0.1, a=1.0, seed=0)]
    [48, 24, 16, 12]
    """
    labels = check_labels(labels, clients, least)
    check_alpha("label-quantity", alpha)
    sizes = _power_law_sizes(len(labels), clients, a, least)
    members = samples_by_class(labels)
    supply = np.array([len(part) for part in members.values()])
    rng = split_generator(seed, "label-quantity")
    wish = _balance_wishes(rng.standard_gamma(alpha, (clients, len(supply))), sizes, supply)
    asked = _round_to_sizes(wish, sizes)

    client, kind = (np.repeat(ids.ravel(), asked.ravel()) for ids in np.indices(asked.shape))
    order = np.lexsort((rng.random(len(kind)), kind))
    client, kind = client[order], kind[order]
    place = np.arange(len(kind)) - np.searchsorted(kind, kind)  # in the queue for this class
    served = place < supply[kind]
    first = np.cumsum(supply) - supply
    line = np.concatenate([part[random_order(len(part), rng)] for part in members.values()])
    owner = np.full(len(labels), -1)
    owner[line[first[kind[served]] + place[served]]] = client[served]
    left, unserved = np.flatnonzero(owner < 0), client[~served]
    owner[left[random_order(len(left), rng)]] = unserved
    return parts_from_owners(owner, clients)


def _balance_wishes(wish: np.ndarray, sizes: np.ndarray, supply: np.ndarray, rounds: int = 30) -> np.ndarray:
    """Wishes scaled by row and column towards the clients' sizes and the classes' supply (Sinkhorn's iteration)."""
    wish = wish / np.maximum(wish.max(1, keepdims=True), 1e-300) + 1e-12
    for _ in range(rounds):
        wish = wish * (supply / wish.sum(0))
        wish = wish * (sizes / wish.sum(1))[:, None]
    return wish


def _round_to_sizes(wish: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Each row in whole numbers that add up to the client's size, the largest remainders rounded up."""
    wish = np.round(wish, 9)  # the last bits differ between machines
    whole = np.floor(wish).astype(np.int64)
    rank = np.argsort(np.argsort(whole - wish, axis=1, kind="stable"), axis=1)
    return whole + (rank < (sizes - whole.sum(1))[:, None])


def _power_law_sizes(n: int, clients: int, a: float, least: int) -> np.ndarray:
    """Sizes proportional to k^-a, largest first."""
    if not 0 <= a < np.inf:
        raise ConfigError(f"a power law of sizes needs a >= 0, seen {a}: 0 is even, 1 means n_k ~ 1/k")
    return apportion(n, np.arange(1, clients + 1, dtype=np.float64) ** -a, least)
