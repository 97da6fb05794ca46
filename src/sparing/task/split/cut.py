"""Train and test by the same law: a stratified cut of a client's samples, or official test samples dealt alike."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparing.core.errors import ConfigError
from sparing.task.split.deal import Parts, by_class, generator, owned, shuffled


def train_test(labels: Any, parts: Sequence[np.ndarray], seed: int, test: float = 0.25) -> tuple[Parts, Parts]:
    """Cut every client's samples in two, each label in about the same proportion on both sides.

    Samples are lined up by label and every 1/test-th is taken, from a random place on. At least one stays for
    training; a small client may have none for testing.

    >>> train, tests = train_test([0, 1] * 8, [np.arange(16)], seed=0)
    >>> len(train[0]), len(tests[0])
    (12, 4)
    """
    check_share("test", test)
    return cut(np.asarray(labels), parts, test, generator(seed))


def cut(labels: np.ndarray, parts: Sequence[np.ndarray], share: float, rng: np.random.Generator) -> tuple[Parts, Parts]:
    """What stays and what is taken, for all clients in one go."""
    size = np.array([len(part) for part in parts], np.int64)
    if not size.sum():
        return [part.copy() for part in parts], [part.copy() for part in parts]
    first, client = np.cumsum(size) - size, np.repeat(np.arange(len(size)), size)
    sample = np.concatenate(parts)
    draws = rng.random(len(sample) + len(size))  # a number per sample of a client, then one for its starting place
    start = np.cumsum(size + 1) - 1
    mark = np.ones(len(draws), bool)
    mark[start] = False
    order = np.lexsort((draws[mark], labels[sample], client))
    place = np.arange(len(sample)) - first[client]
    begin = draws[start][client]
    taken = np.zeros(len(sample), bool)
    taken[order] = np.floor((place + 1) * share + begin) > np.floor(place * share + begin)
    all_gone = np.bincount(client, taken, len(size)) == size
    taken[first[all_gone & (size > 0)]] = False
    edges = np.cumsum(size)[:-1]
    pairs = [(part[~t], part[t]) for part, t in zip(parts, np.split(taken, edges), strict=True)]
    return [stays for stays, _ in pairs], [goes for _, goes in pairs]


def follow(labels: np.ndarray, parts: Parts, more: np.ndarray, seed: int) -> Parts:
    """Deal out further samples (their labels are `more`) in the clients' proportions of each class.

    A client's count of a class is its exact share rounded up or down; who is owed most over all classes so far is
    rounded up first, so that totals come out right too. A class that no client has goes to nobody.

    >>> follow(np.array([0, 0, 0, 0, 1, 1]), [np.arange(3), np.arange(3, 6)], np.array([0, 1, 0, 1, 0, 0]), seed=0)
    [array([0, 2, 4]), array([1, 3, 5])]
    """
    clients, rng = len(parts), generator(seed, "follow")
    client = np.empty(len(labels), np.int64)
    client.fill(-1)
    client[np.concatenate(parts)] = np.repeat(np.arange(clients), [len(part) for part in parts])
    have, lot = by_class(np.where(client < 0, -1, labels)), rng.random(clients)
    owed, owner = np.zeros(clients), np.full(len(more), -1)
    for label, fresh in by_class(more).items():
        if label not in have:
            continue
        count = np.bincount(client[have[label]], minlength=clients)
        whole, rest = np.divmod(count * len(fresh), count.sum())
        part = rest / count.sum()
        owed += part
        up = np.lexsort((lot, -owed, part == 0))[: len(fresh) - whole.sum()]
        whole[up] += 1
        owed[up] -= 1
        owner[fresh[shuffled(len(fresh), rng)]] = np.repeat(np.arange(clients), whole)
    return owned(owner, clients)


def check_share(what: str, share: float) -> None:
    if not 0 <= share < 1:
        raise ConfigError(f"the {what} share must be in [0, 1), seen {share}: 0.25 keeps three quarters for training")
