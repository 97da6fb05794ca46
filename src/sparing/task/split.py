"""Who owns which sample: partitions as pure functions of (labels, seed), the same on any machine.

Every sample goes to exactly one client and no client stays empty.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparing.core.errors import ConfigError

Parts = list[np.ndarray]
"""One sorted int64 array of sample numbers per client."""


def iid(labels: Any, clients: int, seed: int) -> Parts:
    """Samples dealt out at random, in parts whose sizes differ by one at most.

    >>> [len(part) for part in iid([0, 1, 0, 1, 0], clients=2, seed=0)]
    [3, 2]
    """
    labels = checked(labels, clients, least=1)
    return [np.sort(part) for part in np.array_split(shuffled(len(labels), generator(seed)), clients)]


def dirichlet(labels: Any, clients: int, alpha: float, seed: int, least: int = 2) -> Parts:
    """Label skew as usual: each class is dealt out in proportions drawn from Dirichlet(alpha), alpha small = skewed.

    A client that came out with fewer than `least` samples is filled up, one sample at a time, by whoever is richest
    then: this ends after at most `clients * least` moves, where drawing again might never.

    >>> parts = dirichlet([0, 1] * 50, clients=4, alpha=0.1, seed=0)
    >>> sum(len(part) for part in parts), min(len(part) for part in parts) >= 2
    (100, True)
    """
    labels = checked(labels, clients, least)
    if not alpha > 0 or not np.isfinite(alpha):
        raise ConfigError(f"dirichlet needs alpha > 0, seen {alpha}: 0.1 is very skewed, 100 almost iid")
    rng = generator(seed)
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        owner[members[shuffled(len(members), rng)]] = np.repeat(
            np.arange(clients), shares(len(members), clients, alpha, rng)
        )
    fill_up(owner, clients, least, shuffled(len(labels), rng))
    return owned(owner, clients)


def shares(n: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """n samples cut into `clients` counts in Dirichlet proportions."""
    share = np.nan_to_num(rng.dirichlet(np.full(clients, alpha)))
    if not share.sum() > 0.5:  # an alpha so small that every draw underflowed: one client has it all
        share[rng.integers(clients)] = 1.0
    edge = np.floor(np.round(np.cumsum(share), 9) * n + 0.5)  # rounded: the last bits differ between machines
    edge[-1] = n
    return np.diff(edge.clip(0, n), prepend=0).astype(np.int64)


def fill_up(owner: np.ndarray, clients: int, least: int, order: np.ndarray) -> None:
    """Move samples from the richest to those below `least`, in place."""
    size = np.bincount(owner, minlength=clients)
    if size.min() >= least:
        return
    mine: list[list[int]] = [[] for _ in range(clients)]
    for sample in order.tolist():
        mine[owner[sample]].append(sample)
    rich = [(-int(n), i) for i, n in enumerate(size)]
    heapq.heapify(rich)
    for poor in np.flatnonzero(size < least).tolist():
        for _ in range(least - int(size[poor])):
            n, donor = heapq.heappop(rich)
            owner[mine[donor].pop()] = poor
            heapq.heappush(rich, (n + 1, donor))


def owned(owner: np.ndarray, clients: int) -> Parts:
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=clients))[:-1])


def train_test(labels: Any, parts: Sequence[np.ndarray], seed: int, test: float = 0.25) -> tuple[Parts, Parts]:
    """Cut every client's samples in two, each label in about the same proportion on both sides.

    Samples are lined up by label and every 1/test-th is taken, from a random place on. At least one stays for
    training; a small client may have none for testing.

    >>> train, tests = train_test([0, 1] * 8, [np.arange(16)], seed=0)
    >>> len(train[0]), len(tests[0])
    (12, 4)
    """
    if not 0 <= test < 1:
        raise ConfigError(f"the test share must be in [0, 1), seen {test}: 0.25 keeps three quarters for training")
    labels, rng = np.asarray(labels), generator(seed)
    cuts = [cut(labels[part], test, rng) for part in parts]
    return (
        [part[~chosen] for part, chosen in zip(parts, cuts, strict=True)],
        [part[chosen] for part, chosen in zip(parts, cuts, strict=True)],
    )


def cut(labels: np.ndarray, test: float, rng: np.random.Generator) -> np.ndarray:
    """Which of one client's samples are for testing: bool `[n]`."""
    order = shuffled(len(labels), rng)
    order = order[np.argsort(labels[order], kind="stable")]
    marks = np.floor(np.arange(len(labels) + 1) * test + rng.random())
    chosen = np.zeros(len(labels), bool)
    chosen[order] = np.diff(marks) > 0
    if chosen.all():
        chosen[:1] = False
    return chosen


def shuffled(n: int, rng: np.random.Generator) -> np.ndarray:
    """A permutation by sorting uniforms, which unlike `permutation` is the same in every numpy."""
    return np.argsort(rng.random(n), kind="stable")


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def checked(labels: Any, clients: int, least: int) -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ConfigError(f"a split needs one label per sample, seen labels of shape {labels.shape}")
    if clients < 1:
        raise ConfigError(f"a split needs at least one client, seen {clients}")
    if least < 1:
        raise ConfigError(f"no client may stay empty, seen least={least}: set it to 1 or more")
    if clients * least > len(labels):
        raise ConfigError(
            f"{clients} clients with at least {least} samples each need {clients * least} samples, "
            f"seen {len(labels)}: take fewer clients"
        )
    return labels
