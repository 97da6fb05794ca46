"""What every law deals with: keyed shuffles, whole shares of whole samples, and nobody left empty."""

import heapq
import zlib
from typing import Any

import numpy as np

from sparing.core.errors import ConfigError

ClientParts = list[np.ndarray]
"""One sorted int64 array of sample numbers per client."""


def split_generator(seed: int, tag: str = "") -> np.random.Generator:
    """A stream of its own for every tag: what one draws never moves another."""
    return np.random.Generator(np.random.PCG64([seed, zlib.crc32(tag.encode())] if tag else seed))


def random_order(n: int, rng: np.random.Generator) -> np.ndarray:
    """A permutation by sorting uniforms, which unlike `permutation` is the same in every numpy."""
    return np.argsort(rng.random(n), kind="stable")


def parts_from_owners(owner: np.ndarray, clients: int) -> ClientParts:
    """The samples of each client, where `owner` has a client per sample or -1 for nobody.

    >>> parts_from_owners(np.array([1, 0, -1, 1]), clients=2)
    [array([1]), array([0, 3])]
    """
    order = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
    return np.split(order, np.cumsum(np.bincount(owner[owner >= 0], minlength=clients))[:-1])


def samples_by_class(labels: np.ndarray) -> dict[int, np.ndarray]:
    """The samples of each class that occurs, in order."""
    found, counts = np.unique(labels, return_counts=True)
    parts = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    return dict(zip(found.tolist(), parts, strict=True)) if len(found) else {}


def apportion(n: int, weight: np.ndarray, least: int = 0) -> np.ndarray:
    """n in whole shares proportional to `weight`, each within one of its exact share and none below `least`.

    Shares below `least` are raised to it and the others share what remains; then the largest remainders round up.

    >>> apportion(10, np.array([1, 1 / 2, 1 / 3, 1 / 4]))
    array([5, 2, 2, 1])
    >>> apportion(10, np.array([100, 1, 1, 1]), least=2)
    array([4, 2, 2, 2])
    """
    raised = np.zeros(len(weight), bool)
    while True:
        rest = n - least * np.count_nonzero(raised)
        exact = np.where(raised, least, weight * (rest / max(weight[~raised].sum(), 1e-300)))
        exact = np.round(exact, 9)  # the last bits differ between machines
        low = exact < least
        if not low.any():
            break
        raised |= low
    whole = np.floor(exact).astype(np.int64)
    most_missing = np.argsort(whole - exact, kind="stable")
    whole[most_missing[: n - whole.sum()]] += 1
    return whole


def dirichlet_counts(n: int, clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """n samples cut into `clients` counts in Dirichlet proportions."""
    share = np.nan_to_num(rng.dirichlet(np.full(clients, alpha)))
    if not share.sum() > 0.5:  # an alpha so small that every draw underflowed: one client has it all
        share[rng.integers(clients)] = 1.0
    edge = np.floor(np.round(np.cumsum(share), 9) * n + 0.5)  # rounded: the last bits differ between machines
    edge[-1] = n
    return np.diff(edge.clip(0, n), prepend=0).astype(np.int64)


def fill_up_poorest(owner: np.ndarray, clients: int, least: int, order: np.ndarray) -> None:
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


def check_labels(labels: Any, clients: int, least: int) -> np.ndarray:
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
