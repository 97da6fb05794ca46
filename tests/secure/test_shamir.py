"""Shares against an independent way to get the polynomial back: linear equations, solved by elimination."""

import contextlib
import secrets

import pytest

from sparing.core.errors import SecureError
from sparing.secure.shamir import PRIME, rebuild_secret, split_secret, values_at


def solved(shares: dict[int, int]) -> list[int]:
    """Coefficients of the polynomial through these points, lowest first, by Gaussian elimination modulo the prime."""
    rows = [[pow(x, j, PRIME) for j in range(len(shares))] + [y] for x, y in shares.items()]
    n = len(rows)
    for i in range(n):
        pivot = next(r for r in range(i, n) if rows[r][i])
        rows[i], rows[pivot] = rows[pivot], rows[i]
        inverse = pow(rows[i][i], PRIME - 2, PRIME)
        rows[i] = [x * inverse % PRIME for x in rows[i]]
        for r in range(n):
            if r != i:
                rows[r] = [(x - rows[r][i] * y) % PRIME for x, y in zip(rows[r], rows[i], strict=True)]
    return [row[-1] for row in rows]


def is_prime(n: int) -> bool:
    """Miller and Rabin, 64 random bases."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for _ in range(64):
        x = pow(secrets.randbelow(n - 3) + 2, odd, n)
        if x not in (1, n - 1) and all((x := x * x % n) != n - 1 for _ in range(twos - 1)):
            return False
    return True


def test_the_field_is_the_smallest_that_holds_a_secret():
    assert is_prime(PRIME)
    assert not any(is_prime(n) for n in range(2**256 + 1, PRIME, 2))


@pytest.mark.parametrize(("threshold", "holders"), [(1, 1), (2, 2), (2, 3), (7, 9), (14, 20), (20, 29)])
def test_against_elimination(threshold, holders):
    for secret in (bytes(32), b"\xff" * 32, secrets.token_bytes(32)):
        points = sorted(secrets.SystemRandom().sample(range(1, 100), holders))
        shares = split_secret(secret, threshold, points)
        some = dict(secrets.SystemRandom().sample(sorted(shares.items()), threshold))
        coefficients = solved(some)
        assert coefficients[0].to_bytes(33, "little")[:32] == secret == rebuild_secret(some)
        assert values_at(coefficients, points) == shares


def test_fewer_than_the_threshold_fit_every_secret():
    shares = split_secret(secrets.token_bytes(32), 5, range(1, 8))
    few = {x: shares[x] for x in (2, 3, 5, 7)}
    for other in (bytes(32), b"\xff" * 32, secrets.token_bytes(32)):
        coefficients = solved({0: int.from_bytes(other, "little"), **few})
        assert values_at(coefficients, few) == few
        assert coefficients[0] == int.from_bytes(other, "little")


def test_the_same_secret_gets_other_shares():
    one, two = (split_secret(bytes(32), 3, range(1, 6)) for _ in range(2))
    assert all(one[x] != two[x] for x in one)


def test_a_wrong_share_gives_another_secret_or_none():
    shares = split_secret(bytes(32), 3, [1, 2, 3])
    shares[2] ^= 1
    with contextlib.suppress(SecureError):
        assert rebuild_secret(shares) != bytes(32)


@pytest.mark.parametrize("points", [[0], [PRIME], [-1]])
def test_no_share_is_the_secret(points):
    with pytest.raises(SecureError):
        split_secret(bytes(32), 2, points)
