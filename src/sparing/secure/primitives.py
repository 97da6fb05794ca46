"""Every call of a cipher, a key exchange or a signature: `cryptography`'s, on plain bytes.

>>> mine, yours = secret_bytes(), secret_bytes()
>>> x25519(x25519_key(mine), x25519_public(yours)) == x25519(x25519_key(yours), x25519_public(mine))
True
"""

import secrets

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sparing.core.errors import SecureError

KEY_BYTES = 32
SIGNATURE_BYTES = 64
TAG_BYTES = 16
ONLY_NONCE = bytes(12)
"""For keys that encrypt once."""


def secret_bytes() -> bytes:
    """256 bits from the operating system: an X25519 or Ed25519 private key, or a seed."""
    return secrets.token_bytes(KEY_BYTES)


def x25519_key(private: bytes) -> X25519PrivateKey:
    """Made once for many exchanges: it takes as long as one."""
    return X25519PrivateKey.from_private_bytes(private)


def x25519_public(private: bytes) -> bytes:
    return x25519_key(private).public_key().public_bytes_raw()


def x25519(private: X25519PrivateKey, public: bytes) -> bytes:
    """The secret that two keys have in common."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise SecureError(f"{public.hex()} is no X25519 public key that hides anything; make a new one") from None


def ed25519_public(private: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def ed25519_sign(private: bytes, statement: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).sign(statement)


def ed25519_verifies(public: bytes, statement: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (InvalidSignature, ValueError):
        return False
    return True


def hkdf_sha256(secret: bytes, salt: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    return HKDF(SHA256(), length, salt=salt, info=info).derive(secret)


def chacha20(key: bytes) -> CipherContext:
    """The key stream of a key that makes no other, from its beginning: what zeros are encrypted to."""
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def seal(key: bytes, data: bytes, about: bytes, nonce: bytes = ONLY_NONCE) -> bytes:
    """ChaCha20-Poly1305: `data` encrypted, and it and `about` authenticated."""
    return ChaCha20Poly1305(key).encrypt(nonce, data, about)


def unseal(key: bytes, box: bytes, about: bytes, nonce: bytes = ONLY_NONCE) -> bytes | None:
    """None where the box was not sealed with this key and about this."""
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, box, about)
    except InvalidTag:
        return None
