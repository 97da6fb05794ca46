"""The server's side of a sum: it passes on what clients prepared, adds up masked uploads, and takes the masks off.

    prepared = {client: read_prepared(...)}      a message that is refused leaves its client out
    total = MaskedSum(terms, prepared)
    total.introduction(client)                   to each of total.prepared
    total.add(client, upload)                    as they come
    total.request(client)                        ends the uploads; the lists are fixed from here on
    total.hear(client, answer)                   as they come
    total.unmasked()                             the sum, or SecureError: never another number

A request that has left can only be repeated: nodes answer no other in this round. Before it, `request` refuses where
the uploads cannot be enough, and the same cohort can be asked again as a new attempt.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from sparing.core.errors import SecureError
from sparing.secure.bit_packing import unpack_words
from sparing.secure.derived_keys import pair_mask_key, seed_commitment, self_mask_key, signed_statement
from sparing.secure.long_term import KeyRoster
from sparing.secure.mask_graph import neighbours_of_all, points_of_shares, those_introduced
from sparing.secure.masks import Words, add_mask, word_type
from sparing.secure.primitives import ed25519_verifies, secret_bytes, x25519, x25519_key, x25519_public
from sparing.secure.shamir import rebuild_secret
from sparing.secure.sum_messages import (
    Introduced,
    Prepared,
    UnmaskLists,
    read_prepare,
    read_shares,
    read_upload,
    write_introduction,
    write_unmask,
)
from sparing.secure.sum_terms import SumTerms


def read_prepared(terms: SumTerms, roster: KeyRoster, client: int, message: bytes) -> Prepared:
    """What a client prepared, if other clients will accept it."""
    if client not in terms.cohort:
        raise SecureError(f"client {client} is not in the cohort of round {terms.round}; it was not asked")
    prepared = read_prepare(message, terms, client, neighbours_of_all(terms)[client])
    key = prepared.key
    statement = signed_statement(terms, client, key.fresh, key.commitment)
    if not ed25519_verifies(roster[client].signing, statement, key.signature):
        raise SecureError(f"the fresh key of client {client} in round {terms.round} is not signed by its roster's key")
    x25519(x25519_key(secret_bytes()), key.fresh)
    return prepared


class MaskedSum:
    """One attempt at the server. Of those who prepared go on those with enough neighbours that go on; the secrets of
    the others could not be rebuilt."""

    def __init__(self, terms: SumTerms, prepared: Mapping[int, Prepared]):
        near, going = neighbours_of_all(terms), those_introduced(terms, prepared)
        if len(going) < terms.least:
            raise SecureError(
                f"{len(prepared)} of {len(terms.cohort)} clients prepared for round {terms.round}, attempt "
                f"{terms.attempt}, {len(going)} with neighbours enough, where {terms.least} are needed; ask again"
            )
        self.terms, self.prepared = terms, {who: prepared[who] for who in sorted(going)}
        self.near = {who: [other for other in near[who] if other in going] for who in self.prepared}
        self.masked: Words = np.zeros(terms.size, word_type(terms.bits))
        self.arrived: set[int] = set()
        self.lists: UnmaskLists | None = None
        self.shares: dict[int, dict[int, int]] = {who: {} for who in self.prepared}  # whose -> holder -> share
        self.heard: set[int] = set()

    def introduction(self, client: int) -> bytes:
        """To a client of `prepared`, about its neighbours."""
        others = {
            other: Introduced(self.prepared[other].key, self.prepared[other].boxes[client])
            for other in self.near[client]
        }
        return write_introduction(self.terms, client, neighbours_of_all(self.terms)[client], others)

    def add(self, client: int, upload: bytes) -> None:
        if client not in self.prepared or client in self.arrived or self.lists is not None:
            raise SecureError(f"an upload of client {client} that is late, doubled or not asked for; it does not count")
        terms = self.terms
        self.masked += unpack_words(read_upload(upload, terms, client), terms.size, terms.bits)
        self.arrived.add(client)

    def request(self, client: int) -> bytes:
        """To unmask. All who were introduced may be asked: one whose upload was lost can still help."""
        if self.lists is None:
            if why := self.why_too_few():
                raise SecureError(f"{why}; wait for more, or ask the same clients again as a new attempt")
            self.lists = UnmaskLists(frozenset(self.arrived), frozenset(self.prepared.keys() - self.arrived))
        return write_unmask(self.terms, client, self.lists)

    def hear(self, client: int, answer: bytes) -> None:
        if self.lists is None or client not in self.prepared or client in self.heard:
            raise SecureError(f"an answer of client {client} that is doubled or not asked for; it does not count")
        given = read_shares(answer, self.terms, client, neighbours_of_all(self.terms)[client])
        for other, share in given.items():
            if other in self.shares:
                self.shares[other][client] = share
        self.heard.add(client)

    def missing(self) -> dict[int, int]:
        """Client -> how many shares of its secret are missing still; empty: the sum can be unmasked."""
        lacking = {who: self.terms.threshold - len(shares) for who, shares in self.shares.items()}
        return {who: n for who, n in lacking.items() if n > 0}

    def unmasked(self) -> Words:
        """The sum modulo 2^m over the survivors, as words."""
        terms, lists = self.terms, self.lists
        missing = self.missing()
        if lists is None or missing:
            raise SecureError(
                f"round {terms.round}, attempt {terms.attempt} lacks shares of {len(missing)} clients, having heard "
                f"{len(self.heard)}; ask the same again, or let the round end as if nobody had arrived"
            )
        secrets = {who: self._secret(who) for who in self.prepared}
        total = self.masked.copy()
        for who in lists.survivors:
            add_mask(total, self_mask_key(terms, secrets[who], who), -1)
        for gone in lists.dropped:
            private = x25519_key(secrets[gone])
            for who in self.near[gone]:
                if who in lists.survivors:
                    key = pair_mask_key(terms, private, self.prepared[who].key.fresh, gone, who)
                    add_mask(total, key, -1 if who < gone else 1)
        return total & total.dtype.type(2**terms.bits - 1)

    def _secret(self, client: int) -> bytes:
        """Seed of a survivor, fresh key of a drop-out, and surely that."""
        terms, key, points = self.terms, self.prepared[client].key, points_of_shares(self.terms)
        holders = sorted(self.shares[client])[: terms.threshold]
        secret = rebuild_secret({points[who]: self.shares[client][who] for who in holders})
        survived = self.lists is not None and client in self.lists.survivors
        said = seed_commitment(terms, secret, client) if survived else x25519_public(secret)
        if said != (key.commitment if survived else key.fresh):
            raise SecureError(
                f"the shares of client {client} in round {terms.round} are not of what it signed: it, or one of "
                f"{len(holders)} who hold them, lied; the sum cannot be unmasked"
            )
        return secret

    def why_too_few(self) -> str:
        """Why the uploads so far cannot be unmasked; empty: they can."""
        terms, where = self.terms, f"in round {self.terms.round}, attempt {self.terms.attempt}"
        if len(self.arrived) < terms.least:
            return f"{len(self.arrived)} uploads {where}, where {terms.least} are needed"
        for who, near in self.near.items():
            n = len(self.arrived.intersection(near))
            if n < terms.threshold:
                return f"{n} uploads of neighbours of client {who} {where}, where {terms.threshold} are needed"
        return ""

    def restore(self, masked: Words, arrived: Iterable[int]) -> None:
        """Go on from uploads that were added before."""
        self.masked, self.arrived = masked.copy(), set(arrived)
