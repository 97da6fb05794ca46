"""Sums are exact or cleanly refused, whoever drops out when."""

import numpy as np
import pytest

from secure.parties import make_clients, plain_sum, play_sum, prepared_sum, random_values, terms_of, uploaded_sum
from sparing.core.errors import SecureError

CLIENTS = {n: make_clients(n) for n in (10, 30, 100)}
MOMENTS = ("before", "after", "during", "spread")


def drop_outs(n: int, share: float, moment: str, rng: np.random.Generator) -> dict[str, list[int]]:
    gone = rng.permutation(n)[: round(share * n)].tolist()
    if moment != "spread":
        return {moment: gone}
    return {name: gone[i::3] for i, name in enumerate(MOMENTS[:3])}


FEW = [
    (n, share, moment)
    for n, shares in ((10, (0, 0.1, 0.2, 0.3, 0.4)), (30, (0, 0.2, 0.3, 0.4)))
    for share in shares
    for moment in (MOMENTS if share else MOMENTS[:1])
]
FEW += [(100, 0, "before"), (100, 0.1, "spread"), (100, 0.2, "before")]
"""All of them, over many seeds, are played by benchmarks/secure_sums.py."""


@pytest.mark.parametrize("seed", [0])
@pytest.mark.parametrize(("n", "share", "moment"), FEW)
def test_exact_or_refused(n, share, moment, seed):
    clients = CLIENTS[n]
    terms = terms_of(clients, size=5, t=max(one.bound.round for one in clients.values()) + 1)
    values = random_values(terms, seed)
    gone = drop_outs(n, share, moment, np.random.default_rng([seed, n, round(100 * share)]))
    try:
        total, whose = play_sum(clients, terms, values, **gone)
    except SecureError:
        assert share >= (0.2 if n == 100 else 0.3)
    else:
        assert whose == set(clients) - set(gone.get("before", []))
        assert total.tolist() == plain_sum(values, whose, terms.bits)


@pytest.mark.parametrize("bits", [8, 9, 16, 17, 21, 32, 33, 53, 63, 64])
def test_every_width(bits):
    clients = make_clients(5)
    terms = terms_of(clients, size=1001, bits=bits)
    values = random_values(terms, bits)
    total, whose = play_sum(clients, terms, values, before=[3])
    assert whose == {0, 1, 2, 4}
    assert total.tolist() == plain_sum(values, whose, bits)


def test_a_client_that_never_prepared():
    clients = make_clients(8)
    terms = terms_of(clients)
    values = random_values(terms, 0)
    total = prepared_sum(clients, terms, gone=[2])
    for who in total.prepared:
        total.add(who, clients[who].upload(total.introduction(who), values[who]))
    for who in total.prepared:
        total.hear(who, clients[who].unmask(total.request(who)))
    assert 2 not in total.prepared
    assert total.unmasked().tolist() == plain_sum(values, set(clients) - {2}, terms.bits)


def test_who_uploaded_too_late_can_help_to_unmask():
    clients = make_clients(10)
    terms = terms_of(clients)
    values = random_values(terms, 0)
    total = uploaded_sum(clients, terms, values, gone=[7, 8])
    for who in (0, 1, 2, 3, 4, 7, 8, 9):
        total.hear(who, clients[who].unmask(total.request(who)))
    assert total.unmasked().tolist() == plain_sum(values, set(clients) - {7, 8}, terms.bits)


def test_a_second_attempt_over_the_same_values():
    clients = make_clients(10)
    first = terms_of(clients, attempt=1)
    values = random_values(first, 0)
    with pytest.raises(SecureError, match="uploads in round 1, attempt 1, where 7"):
        play_sum(clients, first, values, before=[0, 1, 2, 3])
    second = terms_of(clients, attempt=2)
    total, whose = play_sum(clients, second, values, before=[9])
    assert total.tolist() == plain_sum(values, whose, second.bits)


def test_asked_again_the_same_is_answered():
    clients = make_clients(6)
    terms = terms_of(clients)
    values = random_values(terms, 0)
    total = uploaded_sum(clients, terms, values)
    introduction = total.introduction(0)
    assert clients[0].upload(introduction, values[0]) == clients[0].upload(introduction, values[0])
    assert clients[0].unmask(total.request(0)) == clients[0].unmask(total.request(0))


def test_values_that_would_wrap_are_refused():
    clients = make_clients(3)
    terms = terms_of(clients, size=2, bits=8)
    total = prepared_sum(clients, terms)
    for wrong in (np.array([256, 0], np.uint64), np.array([1, 2], np.int64), np.array([1], np.uint8)):
        with pytest.raises(SecureError):
            clients[0].upload(total.introduction(0), wrong)
    clients[0].upload(total.introduction(0), np.array([255, 0], np.uint64))
