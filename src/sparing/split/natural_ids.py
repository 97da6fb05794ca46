"""Clients as the world made them: writers, roles, subjects, domains, superclasses."""

import numpy as np

from sparing.core.errors import ConfigError
from sparing.split.dealing import random_order, split_generator

_PICKS = ("random", "largest")


def choose_natural_ids(
    ids: np.ndarray, clients: int | None, seed: int, least: int = 1, pick: str = "random", what: str = "group"
) -> np.ndarray:
    """The ids that become clients, ascending: all with at least `least` samples, or `clients` of those.

    Which ones is drawn by the seed, so that they stand for the others; `pick="largest"` takes those with most
    samples. Negative ids mark samples of nobody.

    >>> ids = np.array([7, 7, 7, 3, 3, 5, -1])
    >>> choose_natural_ids(ids, None, seed=0), choose_natural_ids(ids, None, seed=0, least=2)
    (array([3, 5, 7]), array([3, 7]))
    >>> choose_natural_ids(ids, 1, seed=0, pick="largest")
    array([7])
    """
    if pick not in _PICKS:
        raise ConfigError(f"{what}: pick is {pick!r}; it must be one of {', '.join(_PICKS)}")
    if least < 1:
        raise ConfigError(f"no client may stay empty, seen least={least}: set it to 1 or more")
    found, sizes = np.unique(ids[ids >= 0], return_counts=True)
    able, sizes = found[sizes >= least], sizes[sizes >= least]
    wanted = len(able) if clients is None else clients
    if not 0 < wanted <= len(able):
        raise ConfigError(
            f"{len(able)} of {len(found)} {what} ids have {least} samples or more, seen clients={wanted}: "
            "ask for no more than that, or leave clients out to take them all"
        )
    order = (
        np.argsort(-sizes, kind="stable")
        if pick == "largest"
        else random_order(len(able), split_generator(seed, "natural"))
    )
    return np.sort(able[order[:wanted]])


def owner_by_id(ids: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The client of each sample, -1 where its id was not chosen.

    >>> owner_by_id(np.array([7, 3, 4, 7]), chosen=np.array([3, 7]))
    array([ 1,  0, -1,  1])
    """
    at = np.minimum(np.searchsorted(chosen, ids), len(chosen) - 1)
    return np.where(chosen[at] == ids, at, -1)
