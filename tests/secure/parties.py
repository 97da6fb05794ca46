"""Clients and a server of a secure sum in one process, with drop-outs at any of three moments."""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from sparing.secure.long_term import KeyRoster, NodeKeys, new_node_keys
from sparing.secure.node_rules import Bound, NodePolicy
from sparing.secure.sum_client import ClientSum, answer_unmask, mask_upload, prepare_sum
from sparing.secure.sum_server import MaskedSum, read_prepared
from sparing.secure.sum_terms import SumTerms, make_sum_terms

RUN = bytes(range(16))
POLICY = NodePolicy()


@dataclasses.dataclass
class Client:
    """A node with one client, which keeps what it must."""

    number: int
    keys: NodeKeys
    roster: KeyRoster
    policy: NodePolicy = POLICY
    bound: Bound = dataclasses.field(default_factory=lambda: Bound(RUN))
    state: ClientSum | None = None

    def prepare(self, terms: SumTerms) -> bytes:
        self.state, self.bound = prepare_sum(terms, self.number, self.keys, self.roster, self.policy, self.bound)
        return self.state.prepare

    def upload(self, introduction: bytes, values: np.ndarray) -> bytes:
        assert self.state is not None
        self.state, upload = mask_upload(self.state, self.roster, introduction, values)
        return upload

    def unmask(self, request: bytes) -> bytes:
        assert self.state is not None
        answer, self.bound = answer_unmask(self.state, self.keys, self.roster, self.policy, request, self.bound)
        return answer


def make_clients(n: int, policy: NodePolicy = POLICY) -> dict[int, Client]:
    keys = {who: new_node_keys() for who in range(n)}
    roster = KeyRoster({who: own.public() for who, own in keys.items()})
    return {who: Client(who, keys[who], roster, policy) for who in keys}


def terms_of(
    cohort: Collection[int], size: int = 40, bits: int = 21, t: int = 1, attempt: int = 1, **other
) -> SumTerms:
    return make_sum_terms(RUN, t, attempt, cohort, size, bits, **other)


def random_values(terms: SumTerms, seed: int) -> dict[int, np.ndarray]:
    """Of every client, over the whole range: sums wrap."""
    rng = np.random.default_rng(seed)
    return {who: rng.integers(0, 2**terms.bits, terms.size, np.uint64) for who in terms.cohort}


def plain_sum(values: Mapping[int, np.ndarray], clients: Collection[int], bits: int) -> list[int]:
    """In Python's integers."""
    return [sum(int(values[who][i]) for who in clients) % 2**bits for i in range(len(next(iter(values.values()))))]


def prepared_sum(clients: Mapping[int, Client], terms: SumTerms, gone: Collection[int] = ()) -> MaskedSum:
    there = {who: clients[who].prepare(terms) for who in terms.cohort if who not in gone}
    roster = next(iter(clients.values())).roster
    return MaskedSum(terms, {who: read_prepared(terms, roster, who, data) for who, data in there.items()})


def uploaded_sum(
    clients: Mapping[int, Client], terms: SumTerms, values: Mapping[int, np.ndarray], gone: Collection[int] = ()
) -> MaskedSum:
    """Everybody has prepared, and uploaded except who is gone."""
    total = prepared_sum(clients, terms)
    for who in total.prepared:
        upload = clients[who].upload(total.introduction(who), values[who])
        if who not in gone:
            total.add(who, upload)
    return total


def play_sum(
    clients: Mapping[int, Client],
    terms: SumTerms,
    values: Mapping[int, np.ndarray],
    before: Collection[int] = (),
    after: Collection[int] = (),
    during: Collection[int] = (),
) -> tuple[np.ndarray, set[int]]:
    """The sum, and whose. Gone before their upload, after it, or once they were asked to unmask (every second of them
    has answered by then, but nobody hears it)."""
    total = prepared_sum(clients, terms)
    for who in total.prepared:
        if who not in before:
            total.add(who, clients[who].upload(total.introduction(who), values[who]))
    for who in total.prepared:
        if who not in before and who not in after:
            request = total.request(who)
            if who not in during:
                total.hear(who, clients[who].unmask(request))
            elif who % 2:
                clients[who].unmask(request)
    return total.unmasked(), set(total.arrived)
