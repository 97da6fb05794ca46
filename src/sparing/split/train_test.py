"""Train and test by the same law: a stratified cut of a client's samples, or official test samples dealt alike."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparing.core.errors import ConfigError
from sparing.split.dealing import ClientParts, parts_from_owners, random_order, samples_by_class, split_generator


def split_train_test(
    labels: Any, parts: Sequence[np.ndarray], seed: int, test: float = 0.25
) -> tuple[ClientParts, ClientParts]:
    """Cut every client's samples in two, each label in about the same proportion on both sides.

    Samples are lined up by label and every 1/test-th is taken, from a random place on. At least one stays for
    training; a small client may have none for testing.

    >>> train, tests = split_train_test([0, 1] * 8, [np.arange(16)], seed=0)
    >>> len(train[0]), len(tests[0])
    (12, 4)
    """
    check_split_share("test", test)
    return cut_stratified(np.asarray(labels), parts, test, split_generator(seed))


def cut_stratified(
    labels: np.ndarray, parts: Sequence[np.ndarray], share: float, rng: np.random.Generator
) -> tuple[ClientParts, ClientParts]:
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


def deal_in_proportion(labels: np.ndarray, parts: ClientParts, more: np.ndarray, seed: int) -> ClientParts:
    """Deal out further samples (their labels are `more`) in the clients' proportions of each class.

    A client's count of a class is its exact share rounded up or down; who is owed most over all classes so far is
    rounded up first, so that totals come out right too. A class that no client has goes to nobody.

    >>> parts = [np.arange(3), np.arange(3, 6)]
    >>> deal_in_proportion(np.array([0, 0, 0, 0, 1, 1]), parts, np.array([0, 1, 0, 1, 0, 0]), seed=0)
    [array([0, 2, 4]), array([1, 3, 5])]
    """
    clients, rng = len(parts), split_generator(seed, "follow")
    client = np.empty(len(labels), np.int64)
    client.fill(-1)
    client[np.concatenate(parts)] = np.repeat(np.arange(clients), [len(part) for part in parts])
    have, lot = samples_by_class(np.where(client < 0, -1, labels)), rng.random(clients)
    owed, owner = np.zeros(clients), np.full(len(more), -1)
    for label, fresh in samples_by_class(more).items():
        if label not in have:
            continue
        count = np.bincount(client[have[label]], minlength=clients)
        whole, rest = np.divmod(count * len(fresh), count.sum())
        part = rest / count.sum()
        owed += part
        up = np.lexsort((lot, -owed, part == 0))[: len(fresh) - whole.sum()]
        whole[up] += 1
        owed[up] -= 1
        owner[fresh[random_order(len(fresh), rng)]] = np.repeat(np.arange(clients), whole)
    return parts_from_owners(owner, clients)


def check_split_share(what: str, share: float) -> None:
    if not 0 <= share < 1:
        raise ConfigError(f"the {what} share must be in [0, 1), seen {share}: 0.25 keeps three quarters for training")
