"""Who is in the sum of a round, and the bytes of every message of it, before any is sent.

Lengths follow from the terms alone, so a simulation knows them without masking anything. They are counted in three
columns of their own: `keys` (terms and signed keys), `shares` (of secrets, encrypted) and `unmask`.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from sparing.secure.bit_packing import packed_bytes
from sparing.secure.mask_graph import neighbours_of_all, those_introduced
from sparing.secure.shamir import SHARE_BYTES
from sparing.secure.sum_messages import BOX_BYTES, MESSAGE_HEAD_BYTES, SIGNED_KEY_BYTES
from sparing.secure.sum_terms import SumTerms
from sparing.wire.frame import BYTE_KINDS

SECURE_KINDS = ("keys", "shares", "unmask")
_SizesByKind = dict[str, Tensor]


class PlannedSum(NamedTuple):
    """One attempt, in which everybody who is `here` prepares, and of those who are introduced the survivors upload and
    answer."""

    terms: SumTerms
    notice_length: int  # bytes that tell a client of the sum, with its download
    here: frozenset[int]
    introduced: frozenset[int]
    survivors: frozenset[int]
    fails: str  # why nothing can be unmasked; empty: it can

    def down(self, ids: Iterable[int]) -> _SizesByKind:
        """What these clients are sent for the sum, beside their download."""
        rows = []
        for who in ids:
            row = dict.fromkeys(SECURE_KINDS, 0) | {"keys": self.notice_length}
            if who in self.introduced:
                others = len(self.introduced.intersection(neighbours_of_all(self.terms)[who]))
                row["keys"] += MESSAGE_HEAD_BYTES + _bitmap_bytes(self.terms.degree) + SIGNED_KEY_BYTES * others
                row["shares"] += BOX_BYTES * others
            if who in self.survivors and not self.fails:
                row["unmask"] += MESSAGE_HEAD_BYTES + 2 * _bitmap_bytes(len(self.terms.cohort))
            rows.append(row)
        return _columns(rows, SECURE_KINDS)

    def up(self, ids: Iterable[int]) -> _SizesByKind:
        """All that these clients send."""
        terms, rows = self.terms, []
        for who in ids:
            row = dict.fromkeys((*BYTE_KINDS, *SECURE_KINDS), 0)
            if who in self.here:
                row |= {"keys": MESSAGE_HEAD_BYTES + SIGNED_KEY_BYTES, "shares": BOX_BYTES * terms.degree}
            if who in self.survivors:
                row |= {"header": MESSAGE_HEAD_BYTES, "value": packed_bytes(terms.size, terms.bits)}
            if who in self.survivors and not self.fails:
                others = len(self.introduced.intersection(neighbours_of_all(terms)[who]))
                row["unmask"] = MESSAGE_HEAD_BYTES + _bitmap_bytes(terms.degree) + SHARE_BYTES * others
            rows.append(row)
        return _columns(rows, (*BYTE_KINDS, *SECURE_KINDS))


def plan_sum(terms: SumTerms, notice_length: int, here: Collection[int], lost: Collection[int]) -> PlannedSum:
    """`here` are the clients of the cohort that prepare, `lost` those of them whose upload never arrives."""
    introduced = those_introduced(terms, here)
    survivors = introduced.difference(lost)
    fails = _why_too_few(terms, introduced, survivors)
    return PlannedSum(terms, notice_length, frozenset(here), introduced, survivors, fails)


def _why_too_few(terms: SumTerms, introduced: frozenset[int], survivors: frozenset[int]) -> str:
    if len(survivors) < terms.least:
        return f"{len(survivors)} of {len(terms.cohort)} clients arrive, where {terms.least} are needed"
    for who, near in neighbours_of_all(terms).items():
        n = len(survivors.intersection(near))
        if who in introduced and n < terms.threshold:
            return f"{n} neighbours of client {who} arrive, where {terms.threshold} are needed"
    return ""


def _bitmap_bytes(n: int) -> int:
    """A bit for each of n clients."""
    return -(-n // 8)


def _columns(rows: list[dict[str, int]], kinds: Iterable[str]) -> _SizesByKind:
    return {kind: torch.tensor([row[kind] for row in rows], dtype=torch.int64) for kind in kinds}
