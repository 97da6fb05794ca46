"""No key of a sum serves twice: whatever differs, from the same secrets comes another key."""

import itertools

import pytest

from secure.parties import make_clients, terms_of
from sparing.core.errors import SecureError
from sparing.secure.derived_keys import pair_mask_key, seed_commitment, self_mask_key, share_key, signed_statement
from sparing.secure.primitives import secret_bytes, x25519_key, x25519_public
from sparing.secure.sum_server import read_prepared

OTHER_TERMS = [{}, {"t": 2}, {"attempt": 2}, {"bits": 22}, {"size": 41}, {"threshold": 8}, {"least": 9}]


def test_no_key_serves_twice():
    private, public, seed = x25519_key(secret_bytes()), x25519_public(secret_bytes()), x25519_public(secret_bytes())
    keys = []
    for terms in [terms_of(range(10), **other) for other in OTHER_TERMS] + [terms_of(range(11))]:
        keys += [pair_mask_key(terms, private, public, *pair) for pair in itertools.combinations(range(4), 2)]
        keys += [self_mask_key(terms, seed, who) for who in range(4)]
        keys += [seed_commitment(terms, seed, who) for who in range(4)]
        for pair in itertools.permutations(range(4), 2):
            keys += [share_key(terms, private, public, *pair, fresh=fresh) for fresh in (bytes(32), b"\1" * 32)]
    keys += [self_mask_key(terms_of(range(10))._replace(run=bytes(16)), seed, 0)]
    assert len(set(keys)) == len(keys) == 8 * (6 + 4 + 4 + 24) + 1


def test_both_of_a_pair_have_one_mask():
    one, other, terms = secret_bytes(), secret_bytes(), terms_of(range(10))
    keys = [
        pair_mask_key(terms, x25519_key(one), x25519_public(other), 3, 7),
        pair_mask_key(terms, x25519_key(other), x25519_public(one), 7, 3),
    ]
    assert keys[0] == keys[1]


def test_a_statement_says_all_that_it_is_about():
    said = [signed_statement(terms_of(range(10), **other), 1, bytes(32), bytes(32)) for other in OTHER_TERMS]
    terms = terms_of(range(10))
    said += [
        signed_statement(terms, 2, bytes(32), bytes(32)),
        signed_statement(terms, 1, b"\1" * 32, bytes(32)),
        signed_statement(terms, 1, bytes(32), b"\1" * 32),
    ]
    assert len(set(said)) == len(said)


def test_a_prepare_message_that_somebody_else_signed():
    clients = make_clients(4)
    terms = terms_of(clients)
    message = clients[0].prepare(terms)
    clients[0].keys = clients[0].keys._replace(signing=secret_bytes())
    with pytest.raises(SecureError, match="not those of the key roster"):
        clients[0].prepare(terms)
    for at in (50, 80, 120, 160):  # in the fresh key, the commitment and the signature
        wrong = message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]
        with pytest.raises(SecureError, match="not signed by its roster's key"):
            read_prepared(terms, clients[0].roster, 0, wrong)
