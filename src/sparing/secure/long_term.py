"""Long-term keys: an Ed25519 key that signs and an X25519 key that encrypts shares. They are never shared out.

Every node holds the roster of all public keys itself, handed out by the operator or pinned at joining, and compares its
fingerprint with other people's: whoever could put keys into it could read along.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sparing.core.errors import SecureError
from sparing.secure.primitives import KEY_BYTES, ed25519_public, secret_bytes, x25519, x25519_key, x25519_public

_FINGERPRINT_BYTES = 24


class PublicKeys(NamedTuple):
    """What others know of a node."""

    signing: bytes  # Ed25519
    sharing: bytes  # X25519

    @property
    def fingerprint(self) -> str:
        """For people to compare: 48 hexadecimal digits in groups of four."""
        return _fingerprint(b"".join(self))


class NodeKeys(NamedTuple):
    """The private keys of one client, kept in a file that only its owner may read."""

    signing: bytes
    sharing: bytes

    def public(self) -> PublicKeys:
        return PublicKeys(ed25519_public(self.signing), x25519_public(self.sharing))

    def __repr__(self) -> str:
        return "NodeKeys(secret)"


def new_node_keys() -> NodeKeys:
    return NodeKeys(secret_bytes(), secret_bytes())


class KeyRoster:
    """Client -> public keys; no two clients have a key in common.

    >>> roster = KeyRoster({who: new_node_keys().public() for who in range(3)})
    >>> read_key_roster(roster.text()) == roster, len(roster.fingerprint)
    (True, 59)
    """

    def __init__(self, keys: Mapping[int, PublicKeys]):
        self._keys = dict(sorted(keys.items()))
        for at, kind in enumerate(PublicKeys._fields):
            owners: dict[bytes, int] = {}
            for who, own in self._keys.items():
                if len(own[at]) != KEY_BYTES:
                    raise SecureError(f"the {kind} key of client {who} has {len(own[at])} bytes, not {KEY_BYTES}")
                if owners.setdefault(own[at], who) != who:
                    raise SecureError(
                        f"clients {owners[own[at]]} and {who} of the key roster have one {kind} key; each needs its own"
                    )
        trial = x25519_key(secret_bytes())
        for own in self._keys.values():
            x25519(trial, own.sharing)

    def __getitem__(self, client: int) -> PublicKeys:
        try:
            return self._keys[client]
        except KeyError:
            raise SecureError(
                f"client {client} is not in the key roster of {len(self)} clients; add its keys"
            ) from None

    def __contains__(self, client: int) -> bool:
        return client in self._keys

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeyRoster) and self._keys == other._keys

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def fingerprint(self) -> str:
        return _fingerprint(self.text().encode())

    def text(self) -> str:
        """A line for each client: its number, the signing key and the sharing key."""
        return "".join(f"{who} {own.signing.hex()} {own.sharing.hex()}\n" for who, own in self._keys.items())


def read_key_roster(text: str) -> KeyRoster:
    keys: dict[int, PublicKeys] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        try:
            who, own = int(words[0]), PublicKeys(*map(bytes.fromhex, words[1:]))
        except (ValueError, TypeError):
            raise SecureError(
                f"line {number} of the key roster is {line[:40]!r}; it must be a client and two keys in hexadecimal"
            ) from None
        if who in keys:
            raise SecureError(f"line {number} of the key roster names client {who} again; delete one of the lines")
        keys[who] = own
    return KeyRoster(keys)


def _fingerprint(data: bytes) -> str:
    digits = hashlib.sha256(b"sparing/secure/fingerprint/" + data).hexdigest()[: 2 * _FINGERPRINT_BYTES]
    return " ".join(digits[i : i + 4] for i in range(0, len(digits), 4))
