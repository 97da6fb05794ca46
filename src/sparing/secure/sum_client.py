"""A client's side of a sum: three exchanges, each state in and state out.

    prepare   a fresh X25519 key and a seed, both in shares among the neighbours, encrypted under long-term keys
    upload    values + self mask + masks towards the neighbours that prepared, signed so that they cancel in pairs
    unmask    of each neighbour one share: of its seed where it survived, of its fresh key where it dropped out

Two things are kept between them. `Bound` (`node_rules`) is durable: it is saved before the message leaves that came
with it. `ClientSum` has the secrets of one attempt. It may be lost, and the client has dropped out then, but it must
never fall back: who keeps it on disk saves the new one before the message leaves.
"""

import hashlib
from typing import NamedTuple

import numpy as np

from sparing.core.errors import SecureError
from sparing.secure.bit_packing import pack_words
from sparing.secure.derived_keys import pair_mask_key, seed_commitment, self_mask_key, share_key, signed_statement
from sparing.secure.long_term import KeyRoster, NodeKeys
from sparing.secure.mask_graph import neighbours_of_all, points_of_shares
from sparing.secure.masks import add_mask, as_words
from sparing.secure.node_rules import (
    Bound,
    NodePolicy,
    bound_to_cohort,
    bound_to_lists,
    check_cohort,
    check_lists,
)
from sparing.secure.primitives import (
    ed25519_sign,
    ed25519_verifies,
    seal,
    secret_bytes,
    unseal,
    x25519_key,
    x25519_public,
)
from sparing.secure.shamir import SHARE_BYTES, split_secret
from sparing.secure.sum_messages import (
    Introduced,
    Prepared,
    SignedKey,
    read_introduction,
    read_unmask,
    share_in,
    write_prepare,
    write_shares,
    write_upload,
)
from sparing.secure.sum_terms import SumTerms, check_sum_terms


class ClientSum(NamedTuple):
    """What a client keeps of one attempt, from prepare to unmask. It is secret."""

    terms: SumTerms
    client: int
    private: bytes  # the fresh key
    seed: bytes  # of the self mask
    prepare: bytes  # the message, to be sent again if it is lost
    introduction: bytes = b""  # as the server sent it, once an upload was made
    upload: bytes = b""  # its digest

    def __repr__(self) -> str:
        return f"ClientSum(client {self.client}, round {self.terms.round}, attempt {self.terms.attempt}, secret)"


def prepare_sum(
    terms: SumTerms, client: int, keys: NodeKeys, roster: KeyRoster, policy: NodePolicy, bound: Bound
) -> tuple[ClientSum, Bound]:
    """Agree to a sum. Save the bound, then send `ClientSum.prepare`."""
    check_cohort(check_sum_terms(terms), client, keys, roster, policy)
    bound = bound_to_cohort(terms, bound)
    private, seed = secret_bytes(), secret_bytes()
    fresh, commitment = x25519_public(private), seed_commitment(terms, seed, client)
    signature = ed25519_sign(keys.signing, signed_statement(terms, client, fresh, commitment))
    key = SignedKey(fresh, commitment, signature)
    neighbours, points = neighbours_of_all(terms)[client], points_of_shares(terms)
    held = [points[other] for other in neighbours]
    of_seed, of_key = (split_secret(secret, terms.threshold, held) for secret in (seed, private))
    sharing, boxes = x25519_key(keys.sharing), {}
    for other, x in zip(neighbours, held, strict=True):
        once = share_key(terms, sharing, roster[other].sharing, client, other, fresh)
        shares = b"".join(share[x].to_bytes(SHARE_BYTES, "little") for share in (of_seed, of_key))
        boxes[other] = seal(once, shares, _about_box(key))
    message = write_prepare(terms, client, Prepared(key, boxes))
    return ClientSum(terms, client, private, seed, message), bound


def mask_upload(
    state: ClientSum, roster: KeyRoster, introduction: bytes, values: np.ndarray
) -> tuple[ClientSum, bytes]:
    """The masked values, towards those who were introduced. The same again gives the same bytes; anything else is
    refused, as the difference of two uploads under one mask has no mask."""
    terms = state.terms
    if state.introduction and introduction != state.introduction:
        raise SecureError(
            f"client {state.client} has masked round {terms.round}, attempt {terms.attempt} towards others already; "
            "ask for a new attempt"
        )
    others = _checked_introduction(state, roster, introduction)
    total = as_words(values, terms.size, terms.bits)
    add_mask(total, self_mask_key(terms, state.seed, state.client))
    private = x25519_key(state.private)
    for other, one in others.items():
        key = pair_mask_key(terms, private, one.key.fresh, state.client, other)
        add_mask(total, key, 1 if state.client < other else -1)
    upload = write_upload(terms, state.client, pack_words(total, terms.bits))
    digest = hashlib.sha256(upload).digest()
    if state.upload and digest != state.upload:
        raise SecureError(
            f"client {state.client} has uploaded other values in round {terms.round}, attempt {terms.attempt}; "
            "ask for a new attempt"
        )
    return state._replace(introduction=introduction, upload=digest), upload


def answer_unmask(
    state: ClientSum, keys: NodeKeys, roster: KeyRoster, policy: NodePolicy, request: bytes, bound: Bound
) -> tuple[bytes, Bound]:
    """One share of each neighbour that prepared. Save the bound, then send the answer.

    A share that did not come as its sender sealed it is left out: the server can do without a few.
    """
    terms = state.terms
    if not state.introduction:
        raise SecureError(f"client {state.client} was introduced to nobody in round {terms.round}; it holds no shares")
    neighbours = neighbours_of_all(terms)[state.client]
    others = read_introduction(state.introduction, terms, state.client, neighbours)
    lists = read_unmask(request, terms, state.client)
    check_lists(terms, state.client, lists, set(neighbours), set(others), policy)
    bound = bound_to_lists(terms, state.prepare, lists, bound)
    sharing, given = x25519_key(keys.sharing), dict[int, int]()
    for other, one in others.items():
        once = share_key(terms, sharing, roster[other].sharing, other, state.client, one.key.fresh)
        shares = unseal(once, one.box, _about_box(one.key))
        at = 0 if other in lists.survivors else SHARE_BYTES
        share = None if shares is None else share_in(shares[at : at + SHARE_BYTES])
        if share is not None:
            given[other] = share
    return write_shares(terms, state.client, neighbours, given), bound


def _about_box(key: SignedKey) -> bytes:
    return key.fresh + key.commitment


def _checked_introduction(state: ClientSum, roster: KeyRoster, introduction: bytes) -> dict[int, Introduced]:
    terms = state.terms
    others = read_introduction(introduction, terms, state.client, neighbours_of_all(terms)[state.client])
    for other, one in others.items():
        statement = signed_statement(terms, other, one.key.fresh, one.key.commitment)
        if not ed25519_verifies(roster[other].signing, statement, one.key.signature):
            raise SecureError(
                f"the fresh key of client {other} in round {terms.round}, attempt {terms.attempt} is not signed by the "
                "key that this node's roster has of it; nothing is masked towards it"
            )
    if len(others) < terms.threshold:
        raise SecureError(
            f"{len(others)} neighbours of client {state.client} prepared in round {terms.round}, where the threshold "
            f"needs {terms.threshold}; ask for a new attempt"
        )
    if terms.all_pairs and len(others) < terms.least - 1:
        raise SecureError(
            f"client {state.client} is told that {len(others)} others prepared in round {terms.round}, where a sum of "
            f"{terms.least} needs {terms.least - 1}; ask for a new attempt"
        )
    return others
