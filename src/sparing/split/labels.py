"""Even dealing and label skew."""

from typing import Any

import numpy as np

from sparing.core.errors import ConfigError
from sparing.split.dealing import (
    ClientParts,
    check_labels,
    dirichlet_counts,
    fill_up_poorest,
    parts_from_owners,
    random_order,
    samples_by_class,
    split_generator,
)


def iid_split(labels: Any, clients: int, seed: int) -> ClientParts:
    """Samples dealt out at random, in parts whose sizes differ by one at most.

    >>> [len(part) for part in iid_split([0, 1, 0, 1, 0], clients=2, seed=0)]
    [3, 2]
    """
    labels = check_labels(labels, clients, least=1)
    return [np.sort(part) for part in np.array_split(random_order(len(labels), split_generator(seed)), clients)]


def dirichlet_split(labels: Any, clients: int, alpha: float, seed: int, least: int = 2) -> ClientParts:
    """Label skew as usual: each class is dealt out in proportions drawn from Dirichlet(alpha), alpha small = skewed.

    A client that came out with fewer than `least` samples is filled up, one sample at a time, by whoever is richest
    then: this ends after at most `clients * least` moves, where drawing again might never.

    >>> parts = dirichlet_split([0, 1] * 50, clients=4, alpha=0.1, seed=0)
    >>> sum(len(part) for part in parts), min(len(part) for part in parts) >= 2
    (100, True)
    """
    labels = check_labels(labels, clients, least)
    check_alpha("dirichlet", alpha)
    rng = split_generator(seed)
    owner = np.empty(len(labels), np.int64)
    for members in samples_by_class(labels).values():
        owner[members[random_order(len(members), rng)]] = np.repeat(
            np.arange(clients), dirichlet_counts(len(members), clients, alpha, rng)
        )
    fill_up_poorest(owner, clients, least, random_order(len(labels), rng))
    return parts_from_owners(owner, clients)


def check_alpha(law: str, alpha: float) -> None:
    if not alpha > 0 or not np.isfinite(alpha):
        raise ConfigError(f"{law} needs alpha > 0, seen {alpha}: 0.1 is very skewed, 100 almost iid")
