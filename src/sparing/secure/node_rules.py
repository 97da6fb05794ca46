"""What a node insists on, and what it has bound itself to: why a lying server gets no client's values twice.

`Bound` is durable. A node takes part in one cohort a round, in however many attempts, and lets one pair of lists of one
attempt be unmasked; the rounds of a run only go forward. So each holder of a client's shares gives one share of one
kind in a round, and as two thresholds are more than all holders and those who collude, one secret of one attempt is all
that comes out. An attempt with another cohort would have other holders, hence the first rule.

With all pairs it follows that whatever lists a server sends to whom, no client is in two sums of a round, and each sum
is of many (`lying_server`).
"""

import hashlib
from typing import NamedTuple

import numpy as np

from sparing.core.errors import SecureError
from sparing.secure.long_term import KeyRoster, NodeKeys
from sparing.secure.lying_server import fewest_summed
from sparing.secure.sum_messages import UnmaskLists
from sparing.secure.sum_terms import FEWEST_CLIENTS, SPARSE_DEGREE, SumTerms


class NodePolicy(NamedTuple):
    """What a node insists on, whatever the server says."""

    clients: int = FEWEST_CLIENTS  # fewest whose sum may be seen; with all pairs, honest ones, whatever the server says
    colluding: int = 0  # share holders who may tell the server all they know
    degree: int = SPARSE_DEGREE  # fewest neighbours where not everybody is one


class Bound(NamedTuple):
    """What a node has bound itself to in the last round that it took part in. Keep it durably, one for each run."""

    run: bytes
    round: int = -1
    cohort: bytes = b""  # digest
    answered: bytes = b""  # digest of the only request to unmask that is answered; empty: none yet


def check_cohort(terms: SumTerms, client: int, keys: NodeKeys, roster: KeyRoster, policy: NodePolicy) -> None:
    where, n = f"round {terms.round}, attempt {terms.attempt}", len(terms.cohort)
    if client not in terms.cohort:
        raise SecureError(f"client {client} is not in the cohort of {where}; send it the terms of its own sum")
    if roster[client] != keys.public():
        raise SecureError(f"the keys of client {client} are not those of the key roster; correct the roster")
    strangers = [who for who in terms.cohort if who not in roster]
    if strangers:
        raise SecureError(f"{where} has client {strangers[0]}, who is not in this node's key roster; it takes no part")
    if min(n, terms.least) < policy.clients:
        raise SecureError(
            f"{where} has {n} clients and unmasks the sum of {terms.least}; this node wants {policy.clients} at least"
        )
    if terms.degree < min(policy.degree, n - 1):
        raise SecureError(f"{where} gives each client {terms.degree} neighbours; this node wants {policy.degree}")
    if 2 * terms.threshold <= terms.degree + policy.colluding:
        raise SecureError(
            f"{where} has a threshold of {terms.threshold} of {terms.degree} shares, which {policy.colluding} who "
            "collude could get round; raise it"
        )
    if terms.all_pairs:
        summed = fewest_summed(n, terms.threshold, terms.least, policy.colluding)
        if summed < policy.clients:
            raise SecureError(
                f"{where} unmasks the sum of {terms.least}, and by lying a server could make it that of {summed}; this "
                f"node wants {policy.clients} at least: raise the least"
            )


def bound_to_cohort(terms: SumTerms, bound: Bound) -> Bound:
    cohort = hashlib.sha256(np.array(terms.cohort, "<u4").tobytes()).digest()
    if terms.run != bound.run:
        raise SecureError(f"a sum of run {terms.run.hex()[:8]}, where this node takes part in {bound.run.hex()[:8]}")
    if terms.round < bound.round:
        raise SecureError(f"a sum of round {terms.round} after one of round {bound.round}; rounds only go forward")
    if terms.round > bound.round:
        return Bound(bound.run, terms.round, cohort)
    if bound.answered:
        raise SecureError(f"round {terms.round} was unmasked by this node already; go on with the next round")
    if bound.cohort != cohort:
        raise SecureError(f"round {terms.round} had another cohort in an earlier attempt; ask the same clients again")
    return bound


def check_lists(
    terms: SumTerms, client: int, lists: UnmaskLists, near: set[int], others: set[int], policy: NodePolicy
) -> None:
    """`near` are the neighbours of the client, `others` those of them that it was introduced to."""
    where = f"the request to unmask round {terms.round}, attempt {terms.attempt}"
    both, named = lists.survivors & lists.dropped, lists.survivors | lists.dropped
    if both:
        raise SecureError(
            f"{where} lists client {min(both)} as survivor and as dropped out; it can be one of them only"
        )
    if client not in named or named & near != others:
        wrong = min((named & near) ^ others, default=client)
        raise SecureError(f"{where} is wrong about client {wrong}: its lists must be those who were introduced")
    least = max(terms.least, policy.clients)
    if len(lists.survivors) < least:
        raise SecureError(f"{where} has {len(lists.survivors)} survivors, where {least} are the least")
    close = len(lists.survivors & (near | {client}))
    if close < terms.threshold:
        raise SecureError(f"{where} has {close} survivors around client {client}; at least {terms.threshold} must be")


def bound_to_lists(terms: SumTerms, prepare: bytes, lists: UnmaskLists, bound: Bound) -> Bound:
    """`prepare` is what this node sent in prepare; having lost it, it could prepare the same attempt again."""
    if (bound.run, bound.round) != (terms.run, terms.round):
        raise SecureError(f"a request to unmask round {terms.round}, where this node is in round {bound.round}")
    about = prepare, *(np.array(sorted(one), "<u4").tobytes() for one in lists)
    answered = hashlib.sha256(terms.digest + b"".join(hashlib.sha256(one).digest() for one in about)).digest()
    if bound.answered not in (b"", answered):
        raise SecureError(f"round {terms.round} was unmasked with another list of survivors; only that one is answered")
    return bound._replace(answered=answered)
