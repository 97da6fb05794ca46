"""What all parties of one sum agree on. Its digest stands in every message, signature and key of the sum.

Shares and lies: k neighbours hold shares of a client's two secrets, any `threshold` of them rebuild one, and c of them
may collude with the server. Where 2 threshold > k + c, no lying about who survived yields both secrets of one client.
"""

import hashlib
import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sparing.core.errors import SecureError
from sparing.secure.lying_server import fewest_summed

ALL_PAIRS = 50
"""Up to so many clients everybody is everybody's neighbour."""
SPARSE_DEGREE = 20
"""Neighbours of each client beyond, unless said otherwise."""
FEWEST_CLIENTS = 3
"""Of two clients each would learn the other's values from the sum."""
_MOST_CLIENTS = 1 << 16
_MOST_VALUES = 1 << 40
_MOST_NUMBER = 1 << 32
RUN_BYTES = 16
ABOUT_BYTES = 32
_TERMS = struct.Struct("<4s16s32sIIQBxxxIIII")
_MAGIC = b"STRM"


class SumTerms(NamedTuple):
    run: bytes  # 16 bytes, new in every run
    round: int
    attempt: int
    cohort: tuple[int, ...]  # clients, ascending
    size: int  # values of a vector
    bits: int  # m: the sum is modulo 2^m
    degree: int  # neighbours of each client; one less than the cohort: all pairs
    threshold: int  # shares that rebuild a secret
    least: int  # uploads below which no sum is unmasked
    about: bytes = bytes(ABOUT_BYTES)  # digest of whatever else all clients must have been told alike

    @property
    def all_pairs(self) -> bool:
        return self.degree == len(self.cohort) - 1

    @property
    def digest(self) -> bytes:
        return _digest(self)


@lru_cache(maxsize=16)
def _digest(terms: SumTerms) -> bytes:
    return hashlib.sha256(b"sparing/secure/terms/" + write_sum_terms(terms)).digest()


def default_threshold(holders: int) -> int:
    """More than two thirds, so that nearly a third may collude."""
    return 2 * holders // 3 + 1


def make_sum_terms(
    run: bytes,
    round: int,
    attempt: int,
    cohort: Iterable[int],
    size: int,
    bits: int,
    degree: int | None = None,
    threshold: int | None = None,
    least: int | None = None,
    clients: int = FEWEST_CLIENTS,
    colluding: int = 0,
    about: bytes = bytes(ABOUT_BYTES),
) -> SumTerms:
    """The terms with what was not said filled in, so that nodes with `NodePolicy(clients, colluding)` take part.

    >>> terms = make_sum_terms(bytes(16), round=1, attempt=1, cohort=range(10), size=5, bits=21)
    >>> terms.degree, terms.threshold, terms.least
    (9, 7, 7)
    >>> make_sum_terms(bytes(16), 1, 1, range(100), 5, 21)[-4:-1]
    (20, 14, 67)
    >>> make_sum_terms(bytes(16), 1, 1, range(50), 5, 21, clients=20, colluding=5)[-4:-1]
    (49, 33, 37)
    """
    cohort = tuple(sorted(cohort))
    others = len(cohort) - 1
    if degree is None:
        degree = others if len(cohort) <= ALL_PAIRS else SPARSE_DEGREE
    degree = min(degree, others)
    if threshold is None:
        threshold = max(default_threshold(degree), (degree + colluding) // 2 + 1)
    if least is None:
        least = max(threshold, default_threshold(others), clients)
        while degree == others and least <= others and fewest_summed(others + 1, threshold, least, colluding) < clients:
            least += 1
    return check_sum_terms(SumTerms(run, round, attempt, cohort, size, bits, degree, threshold, least, about))


def check_sum_terms(terms: SumTerms) -> SumTerms:
    """The same, if a sum by them makes sense."""
    n = len(terms.cohort)
    if len(terms.run) != RUN_BYTES:
        raise SecureError(f"a run named by {len(terms.run)} bytes; it has {RUN_BYTES}")
    if len(terms.about) != ABOUT_BYTES:
        raise SecureError(f"a digest of {len(terms.about)} bytes in the terms of a sum; it has {ABOUT_BYTES}")
    if not (0 <= terms.round < _MOST_NUMBER and 0 <= terms.attempt < _MOST_NUMBER):
        raise SecureError(
            f"round {terms.round}, attempt {terms.attempt}: both must lie between 0 and {_MOST_NUMBER - 1}"
        )
    if not FEWEST_CLIENTS <= n <= _MOST_CLIENTS:
        raise SecureError(
            f"a secure sum of {n} clients; it takes {FEWEST_CLIENTS} to {_MOST_CLIENTS}, so ask others too"
        )
    if any(not 0 <= who < _MOST_NUMBER for who in terms.cohort) or tuple(sorted(set(terms.cohort))) != terms.cohort:
        raise SecureError("the clients of a secure sum must ascend from 0, and none may stand there twice")
    if not 0 < terms.size < _MOST_VALUES:
        raise SecureError(f"a secure sum of vectors of {terms.size} values; they must have 1 to {_MOST_VALUES - 1}")
    if not 8 <= terms.bits <= 64:
        raise SecureError(f"a secure sum modulo 2^{terms.bits}; the exponent must lie between 8 and 64")
    sparse = not terms.all_pairs
    if sparse and (n <= ALL_PAIRS or terms.degree % 2 or not 2 <= terms.degree < n):
        raise SecureError(
            f"{n} clients with {terms.degree} neighbours each; up to {ALL_PAIRS} clients it must be all others, beyond "
            "that an even number, or all others"
        )
    if not terms.degree < 2 * terms.threshold <= 2 * terms.degree:
        raise SecureError(
            f"a threshold of {terms.threshold} of {terms.degree} shares; it must be more than half of them, at most all"
        )
    low = max(terms.threshold, FEWEST_CLIENTS)
    if not low <= terms.least <= n:
        raise SecureError(f"a sum of {terms.least} uploads at least; it must lie between {low} and {n}")
    return terms


def write_sum_terms(terms: SumTerms) -> bytes:
    head = _TERMS.pack(
        _MAGIC, terms.run, terms.about, terms.round, terms.attempt, terms.size, terms.bits, terms.degree,
        terms.threshold, terms.least, len(terms.cohort),
    )  # fmt: skip
    return head + np.array(terms.cohort, "<u4").tobytes()


def read_sum_terms(data: bytes) -> SumTerms:
    """The terms in bytes that may come from anyone; SecureError for all else."""
    if len(data) < _TERMS.size:
        raise SecureError(f"terms of {len(data)} bytes, where the head alone has {_TERMS.size}; send them again")
    magic, run, about, t, attempt, size, bits, degree, threshold, least, n = _TERMS.unpack(data[: _TERMS.size])
    if magic != _MAGIC or n > _MOST_CLIENTS or len(data) != _TERMS.size + 4 * n:
        raise SecureError(f"{len(data)} bytes that are not the terms of a sum of {n} clients; send them again")
    cohort = tuple(np.frombuffer(data, "<u4", offset=_TERMS.size).tolist())
    terms = check_sum_terms(SumTerms(run, t, attempt, cohort, size, bits, degree, threshold, least, about))
    if write_sum_terms(terms) != data:
        raise SecureError("terms of a sum with something in their padding; send them again")
    return terms
