"""Who masks towards whom, and holds whose shares: all pairs, or a k-regular graph that everybody computes alike.

The sparse graph is a ring of the clients in an order that SHA-256 gives, each joined to the k / 2 on either side (Bell
et al. 2020). Its order follows from public values that the server has a hand in, so a lying server could surround
somebody with its own: what is promised against a lying server is promised for all pairs only. It does not change with
the attempt, so that in all attempts of a round the same clients hold a client's shares.
"""

import hashlib
from collections.abc import Collection, Mapping
from functools import lru_cache

import numpy as np

from sparing.secure.sum_terms import SumTerms


@lru_cache(maxsize=16)
def neighbours_of_all(terms: SumTerms) -> Mapping[int, tuple[int, ...]]:
    """Client -> its neighbours, ascending."""
    if terms.all_pairs:
        return {who: tuple(other for other in terms.cohort if other != who) for who in terms.cohort}
    ring, half = ring_of_clients(terms), terms.degree // 2
    n = len(ring)
    steps = [step for step in range(-half, half + 1) if step]
    return {ring[i]: tuple(sorted(ring[(i + step) % n] for step in steps)) for i in range(n)}


def those_introduced(terms: SumTerms, prepared: Collection[int]) -> frozenset[int]:
    """Of those who prepared, those with enough neighbours that go on; the secrets of others could not be rebuilt."""
    near, going = neighbours_of_all(terms), set(prepared)
    while lonely := {who for who in going if len(going.intersection(near[who])) < terms.threshold}:
        going -= lonely
    return frozenset(going)


def points_of_shares(terms: SumTerms) -> dict[int, int]:
    """Client -> the point at which it holds the polynomials of its neighbours."""
    return {who: i + 1 for i, who in enumerate(terms.cohort)}


def ring_of_clients(terms: SumTerms) -> list[int]:
    """In the order of the sparse graph."""
    cohort = np.array(terms.cohort, "<u4").tobytes()
    seed = hashlib.sha256(b"sparing/secure/ring/" + terms.run + terms.round.to_bytes(4, "little") + cohort).digest()
    return sorted(terms.cohort, key=lambda who: hashlib.sha256(seed + who.to_bytes(4, "little")).digest())
