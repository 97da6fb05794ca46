"""What a run has spent of its clients' privacy: (epsilon, delta) after t rounds, by Rényi accounting.

Neighbours are runs in which one client's data is replaced by other data, whatever it is. That changes a sum of clipped
updates by 2 C, so noise z C counts as a Gaussian mechanism of noise multiplier z / 2.

central   whoever sees every round's model, but not who took part in it. Each round is a Gaussian mechanism on a cohort
          of n drawn without replacement from those present; where that bound is looser than no sampling at all, it is
          taken without sampling.
local     whoever sees every upload and knows whose it is: no sampling. For the client that took part most often.
summed    whoever sees every secure sum and knows of whom it is, so no sampling either: the noise of the honest clients
          that are in every sum at least is as large as central noise.

Both follow from the study and from what was released: a round that was released twice, with other values, counts
twice (`runs/privacy/releases.py`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from sparing.core.context import EVERYONE
from sparing.core.errors import ConfigError
from sparing.core.method import Privacy
from sparing.fleet.fleet import Fleet
from sparing.runs.privacy.releases import Releases

_CohortCounts = Counter[tuple[int, ...]]
"""How many rounds drew n clients from a pool: `times[pool, n]`; `times[pool, n, k]`: and released them k times."""


_HOLDS_FOR = {
    "central": "holds for whoever sees the models but not ledger.csv, clients.csv or kept parcels, which name who took "
    "part, nor checkpoint, pictures, clock and log, which can tell",
    "local": "holds for whoever sees every upload and knows whose it is",
    "summed": "holds for whoever sees every secure sum and knows who is in it, the server included, unless more "
    "clients collude than secure.colluding says",
}


def privacy_promise(mode: str, secret: bool) -> str:
    """For whom an epsilon holds, to be said beside it."""
    return (
        _HOLDS_FOR[mode] if secret else "protects nobody: the noise follows the study's public seed (dp.source: seed)"
    )


class PrivacyAccount(NamedTuple):
    """`spent(t)` is epsilon after round t; `last` the last round that can be paid for, `why` if not all can."""

    spent: Callable[[int], float]
    last: int
    why: str = ""


def open_privacy_account(
    privacy: Privacy,
    fleet: Fleet,
    clients: int,
    count: int,
    seed: int,
    rounds: int,
    releases: Releases | None = None,
) -> PrivacyAccount:
    """Of a run that asks `count` of its clients a round. A budget that does not pay for one round is refused."""
    training = clients - (0 if fleet.held_out is None else len(fleet.held_out))
    delta = privacy.delta if privacy.delta is not None else max(training, 2) ** -1.1

    history = (_cohort_history if privacy.mode == "central" else _participation_history)(
        fleet, clients, count, seed, releases or Releases()
    )
    known: list[_CohortCounts] = []

    def spent(t: int) -> float:
        known.extend(itertools.islice(history, max(0, t + 1 - len(known))))
        return epsilon_of_cohorts(privacy.noise, known[t], delta)

    if privacy.epsilon is None or spent(rounds) <= privacy.epsilon:
        return PrivacyAccount(spent, rounds)
    if spent(1) > privacy.epsilon:
        raise ConfigError(
            f"dp.epsilon is {privacy.epsilon:g}, but one round spends {spent(1):.3g} (delta {delta:.2g}): raise noise"
        )
    low, high = 1, rounds  # low can be paid for, high cannot
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spent(middle) <= privacy.epsilon else (low, middle)
    return PrivacyAccount(
        spent,
        low,
        f"round {high} of {rounds} would spend epsilon {spent(high):.4g}, more than dp.epsilon {privacy.epsilon:g}",
    )


def epsilon_of_cohorts(noise: float, times: _CohortCounts, delta: float) -> float:
    """After `times[pool, n]` rounds with cohorts of n out of pool clients.

    >>> round(epsilon_of_cohorts(8.0, Counter({(1000, 20): 100}), delta=1e-5), 4)
    0.4002
    """
    if noise == 0 and any(times.values()):
        return math.inf
    orders, spent = _accounting_library().DEFAULT_RDP_ORDERS, 0.0
    for (pool, n, *copies), often in times.items():
        # k releases of one cohort, each with noise of its own, are one with noise / sqrt(k): it was sampled once
        spent = spent + often * np.array(_renyi_divergence(noise / math.sqrt(*copies or (1,)), pool, n))
    return float(_accounting_library().compute_epsilon(orders, np.broadcast_to(spent, len(orders)), delta)[0])


@cache
def _renyi_divergence(noise: float, pool: int, n: int) -> tuple[float, ...]:
    """Of one round, by Rényi order."""
    from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent

    def of(event: Any) -> np.ndarray:
        accountant = _accounting_library().RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE)
        return accountant.compose(event)._rdp  # composing a round anew for every round would take seconds

    whole = GaussianDpEvent(noise / 2)
    return tuple(np.minimum(of(whole), of(SampledWithoutReplacementDpEvent(pool, n, whole))) if n < pool else of(whole))


def _accounting_library() -> Any:
    try:
        from dp_accounting.rdp import rdp_privacy_accountant
    except ImportError:
        raise ConfigError("dp counts epsilon with dp-accounting, which is missing: pip install dp-accounting") from None
    return rdp_privacy_accountant


def _cohort_history(fleet: Fleet, clients: int, count: int, seed: int, releases: Releases) -> Iterator[_CohortCounts]:
    """After 0, 1, 2, ... rounds: how many of them drew how many clients from how many present."""
    found: _CohortCounts = Counter()
    for t in itertools.count(1):
        yield Counter(found)
        pool = int(fleet.present(seed, t, clients).sum())
        if pool:
            cohort, copies = (pool, min(count, pool)), releases.count(t, EVERYONE)
            found[cohort if copies == 1 else (*cohort, copies)] += 1


def _participation_history(
    fleet: Fleet, clients: int, count: int, seed: int, releases: Releases
) -> Iterator[_CohortCounts]:
    """After 0, 1, 2, ... rounds: how often the client took part that did so most often, each time known to have."""
    times = torch.zeros(clients, dtype=torch.int64)
    for t in itertools.count(1):
        yield Counter({(1, 1): int(times.max())})
        for who in fleet.cohort(seed, t, clients, count).tolist():
            times[who] += releases.count(t, who)
