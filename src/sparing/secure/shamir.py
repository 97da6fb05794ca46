"""Shamir's secret sharing of 32 bytes: a polynomial over a prime field, of which any `threshold` values give the rest.

>>> shares = split_secret(bytes(range(32)), threshold=3, points=[1, 2, 3, 4, 5])
>>> rebuild_secret({x: shares[x] for x in (5, 1, 3)}) == bytes(range(32))
True
"""

import secrets
from collections.abc import Iterable, Mapping
from functools import lru_cache

from sparing.core.errors import SecureError

PRIME = 2**256 + 297
"""The smallest above 2^256."""
SHARE_BYTES = 33
SECRET_BYTES = 32


def split_secret(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, int]:
    """Point -> share."""
    if len(secret) != SECRET_BYTES:
        raise SecureError(f"a secret of {len(secret)} bytes to be shared; it has {SECRET_BYTES}")
    drawn = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    return values_at([int.from_bytes(secret, "little"), *drawn], points)


def values_at(coefficients: list[int], points: Iterable[int]) -> dict[int, int]:
    """Of the polynomial with these coefficients, lowest first."""
    values = {}
    for x in points:
        if not 0 < x < PRIME:
            raise SecureError(f"a share at point {x}, which would be the secret or nothing; points count from 1")
        y = 0
        for c in reversed(coefficients):
            y = (y * x + c) % PRIME
        values[x] = y
    return values


def rebuild_secret(shares: Mapping[int, int]) -> bytes:
    """From as many shares as the threshold. From others' shares comes another secret, or SecureError: the caller must
    be able to tell."""
    weights = _weights_at_zero(tuple(shares))
    value = sum(weight * y for weight, y in zip(weights, shares.values(), strict=True)) % PRIME
    if value >> (8 * SECRET_BYTES):
        raise SecureError(f"{len(shares)} shares that are not of one secret; leave this sum")
    return value.to_bytes(SECRET_BYTES, "little")


@lru_cache(maxsize=256)
def _weights_at_zero(points: tuple[int, ...]) -> tuple[int, ...]:
    """Lagrange's: weight i = product over j of x_j / (x_j - x_i), all divided by one inverse."""
    above, below = 1, []
    for x in points:
        above = above * x % PRIME
        product = x
        for other in points:
            if other != x:
                product = product * (other - x) % PRIME
        below.append(product)
    before = [1]
    for product in below:
        before.append(before[-1] * product % PRIME)
    inverse, weights = pow(before[-1], -1, PRIME) * above % PRIME, []
    for i in reversed(range(len(points))):
        weights.append(inverse * before[i] % PRIME)
        inverse = inverse * below[i] % PRIME
    return tuple(reversed(weights))
