"""Messages as bytes and back, and what hostile bytes can do: raise SecureError, or be a message."""

import contextlib
import copy
import random
from collections.abc import Callable

import pytest

from secure.parties import make_clients, prepared_sum, random_values, terms_of
from sparing.core.errors import SecureError
from sparing.secure.long_term import read_key_roster
from sparing.secure.mask_graph import neighbours_of_all
from sparing.secure.sum_messages import (
    UnmaskLists,
    read_introduction,
    read_prepare,
    read_shares,
    read_unmask,
    read_upload,
    write_introduction,
    write_prepare,
    write_shares,
    write_unmask,
)
from sparing.secure.sum_server import MaskedSum, read_prepared
from sparing.secure.sum_terms import check_sum_terms, make_sum_terms, read_sum_terms, write_sum_terms

CLIENTS = make_clients(11)
TERMS = terms_of(CLIENTS, size=13, bits=13)
TOTAL = prepared_sum(CLIENTS, TERMS)
NEAR = neighbours_of_all(TERMS)[0]
LISTS = UnmaskLists(frozenset(range(9)), frozenset({9, 10}))
MESSAGES = {
    "prepare": CLIENTS[0].state.prepare,  # type: ignore[union-attr]
    "introduction": TOTAL.introduction(0),
    "upload": CLIENTS[0].upload(TOTAL.introduction(0), random_values(TERMS, 0)[0]),
    "unmask": write_unmask(TERMS, 0, LISTS),
    "shares": CLIENTS[0].unmask(write_unmask(TERMS, 0, LISTS)),
    "terms": write_sum_terms(TERMS),
}
READERS: dict[str, Callable[[bytes], object]] = {
    "prepare": lambda data: read_prepare(data, TERMS, 0, NEAR),
    "introduction": lambda data: read_introduction(data, TERMS, 0, NEAR),
    "upload": lambda data: read_upload(data, TERMS, 0),
    "unmask": lambda data: read_unmask(data, TERMS, 0),
    "shares": lambda data: read_shares(data, TERMS, 0, NEAR),
    "terms": read_sum_terms,
}


def used_by_a_party(kind: str, data: bytes) -> None:
    """What a client or the server does with it."""
    total = MaskedSum(TERMS, TOTAL.prepared)
    client = copy.copy(CLIENTS[0])
    if kind == "prepare":
        read_prepared(TERMS, CLIENTS[0].roster, 0, data)
    elif kind == "introduction":
        client.state = client.state._replace(introduction=b"", upload=b"")
        client.upload(data, random_values(TERMS, 0)[0])
    elif kind == "upload":
        total.add(0, data)
    elif kind == "unmask":
        client.unmask(data)
    elif kind == "shares":
        total.lists = LISTS
        total.hear(0, data)


def damaged(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(6)
    if kind == 0:
        return rng.randbytes(rng.randrange(2 * len(data)))
    if kind == 1:
        return data[: rng.randrange(len(data))]
    if kind == 2:
        return data + rng.randbytes(rng.randrange(1, 50))
    if kind == 3:
        return data[:44] + rng.randbytes(rng.randrange(len(data)))
    if kind == 4:
        return data[:44] + rng.randbytes(len(data) - 44)
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("seed", [0])
def test_hostile_bytes(kind, seed):
    rng, data = random.Random(f"{kind}/{seed}"), MESSAGES[kind]
    READERS[kind](data)
    for _ in range(150):
        wrong = damaged(data, rng)
        for use in (READERS[kind], lambda one: used_by_a_party(kind, one)):
            with contextlib.suppress(SecureError):
                use(wrong)


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_truncation(kind):
    for n in range(len(MESSAGES[kind])):
        with pytest.raises(SecureError):
            READERS[kind](MESSAGES[kind][:n])
    with pytest.raises(SecureError):
        READERS[kind](MESSAGES[kind] + b"\0")


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_of_another_kind(kind):
    for other, data in MESSAGES.items():
        if other != kind:
            with pytest.raises(SecureError):
                READERS[kind](data)


def test_back_and_forth():
    prepared = read_prepare(MESSAGES["prepare"], TERMS, 0, NEAR)
    assert write_prepare(TERMS, 0, prepared) == MESSAGES["prepare"]
    others = read_introduction(MESSAGES["introduction"], TERMS, 0, NEAR)
    assert list(others) == list(NEAR)
    assert write_introduction(TERMS, 0, NEAR, others) == MESSAGES["introduction"]
    assert read_unmask(MESSAGES["unmask"], TERMS, 0) == LISTS
    assert write_shares(TERMS, 0, NEAR, read_shares(MESSAGES["shares"], TERMS, 0, NEAR)) == MESSAGES["shares"]
    assert read_sum_terms(MESSAGES["terms"]) == TERMS


@pytest.mark.parametrize("n", [51, 100, 101])
def test_the_sparse_graph(n):
    terms = make_sum_terms(bytes(16), 1, 1, range(n), 1, 16)
    near = neighbours_of_all(terms)
    assert all(len(set(others)) == 20 and who not in others for who, others in near.items())
    assert all(who in near[other] for who, others in near.items() for other in others)
    assert near == neighbours_of_all(terms._replace(attempt=2)) != neighbours_of_all(terms._replace(round=2))


@pytest.mark.parametrize(
    "wrong",
    [
        {"cohort": (2, 1, 0)},
        {"cohort": (0, 1, 1, 2)},
        {"cohort": (0, 1)},
        {"bits": 7},
        {"bits": 65},
        {"size": 0},
        {"run": b"short"},
        {"round": -1},
        {"degree": 8},
        {"threshold": 11},
        {"least": 12},
    ],
)
def test_terms_that_make_no_sense(wrong):
    with pytest.raises(SecureError):
        check_sum_terms(TERMS._replace(**wrong))


@pytest.mark.parametrize("line", ["0", "x y z", "0 00 11", "0 zz zz", "1 " + "00" * 32 + " " + "11" * 31])
def test_a_roster_that_is_none(line):
    with pytest.raises(SecureError):
        read_key_roster(line + "\n")


def test_a_roster_with_a_client_twice():
    text = CLIENTS[0].roster.text()
    with pytest.raises(SecureError, match="line 12 of the key roster names client 0 again"):
        read_key_roster(text + text.splitlines()[0])
