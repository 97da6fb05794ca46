"""Every key and statement of a sum. Each key is HKDF-SHA256 over (run, round, attempt, both clients, purpose), salted
with the digest of the terms, and serves once.

A share is encrypted under a key that also depends on the sender's fresh public key. So even a client that has forgotten
that it prepared, and prepares the same attempt again, does not use a key twice.
"""

import struct

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from sparing.secure.primitives import hkdf_sha256, x25519
from sparing.secure.sum_terms import SumTerms

_ABOUT = struct.Struct("<16sIIII")


def pair_mask_key(terms: SumTerms, private: X25519PrivateKey, public: bytes, one: int, other: int) -> bytes:
    """Of the mask that two clients have in common, from one's fresh private key and the other's public one."""
    return _derived(terms, x25519(private, public), b"pair mask", min(one, other), max(one, other))


def self_mask_key(terms: SumTerms, seed: bytes, client: int) -> bytes:
    return _derived(terms, seed, b"self mask", client, client)


def seed_commitment(terms: SumTerms, seed: bytes, client: int) -> bytes:
    """Tells whether a rebuilt seed is the right one, and nothing of the seed."""
    return _derived(terms, seed, b"seed commitment", client, client)


def share_key(
    terms: SumTerms, private: X25519PrivateKey, public: bytes, sender: int, receiver: int, fresh: bytes
) -> bytes:
    """From long-term keys, for the shares of one client for another; `fresh` is the sender's fresh public key."""
    return _derived(terms, x25519(private, public), b"shares", sender, receiver, fresh)


def signed_statement(terms: SumTerms, client: int, fresh: bytes, commitment: bytes) -> bytes:
    """What a client signs in prepare."""
    return b"sparing/secure/fresh key/" + terms.digest + client.to_bytes(4, "little") + fresh + commitment


def _derived(terms: SumTerms, secret: bytes, purpose: bytes, one: int, other: int, more: bytes = b"") -> bytes:
    about = _ABOUT.pack(terms.run, terms.round, terms.attempt, one, other)
    return hkdf_sha256(secret, terms.digest, b"sparing/secure/" + purpose + b"/" + about + more)
