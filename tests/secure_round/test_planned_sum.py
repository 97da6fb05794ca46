"""The plan of a sum is its truth: lengths that were counted are those of messages that were written."""

import itertools

import numpy as np
import pytest

from sparing.core.errors import SecureError, SparingError
from sparing.secure.mask_graph import neighbours_of_all
from sparing.secure.masks import word_type
from sparing.secure.node_rules import NodePolicy
from sparing.secure.sum_terms import make_sum_terms
from sparing.secure_round.one_process import OneProcessSum, SimulatedNodes
from sparing.secure_round.planned_sum import plan_sum
from sparing.secure_round.settings import SecureSettings

NOTICE = 77


def drop_outs(n: int, absent: int, lost: int) -> tuple[list[int], list[int]]:
    """Who is here, and whose upload is lost."""
    order = np.random.default_rng(n).permutation(n).tolist()
    return sorted(order[absent:]), order[absent : absent + lost]


def upload_all(total: OneProcessSum, bits: int, size: int) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(1)
    words = {who: rng.integers(0, 2**bits, size, np.uint64).astype(word_type(bits)) for who in total.planned.here}
    for who, vector in words.items():
        total.upload(who, vector)
    return {who: words[who].astype(object) for who in total.planned.survivors}


@pytest.mark.parametrize(("n", "absent", "lost"), [(3, 0, 0), (10, 1, 1), (10, 0, 2), (17, 1, 0), (17, 2, 3)])
def test_planned_bytes_are_those_of_the_messages(n, absent, lost):
    check_lengths(n, None, absent, lost)


@pytest.mark.parametrize(("absent", "lost"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_planned_bytes_are_those_of_the_messages_in_a_sparse_graph(absent, lost):
    check_lengths(52, 8, absent, lost)


def check_lengths(n: int, degree: int | None, absent: int, lost: int) -> None:
    bits, size = 8 + n % 57, 11 + n
    nodes = SimulatedNodes(NodePolicy(degree=degree or 20), seed=0)
    terms = make_sum_terms(nodes.run, 1, 1, range(n), size, bits, degree)
    plan = plan_sum(terms, NOTICE, *drop_outs(n, absent, lost))
    assert len(plan.survivors) == n - absent - lost
    total = OneProcessSum(plan, nodes)
    values = upload_all(total, bits, size)
    found = total.unmasked()  # compares every length
    assert found.tolist() == [x % 2**bits for x in sum(values.values())]
    ids = sorted(plan.here)
    up, down = (sum(sizes.values()) for sizes in (plan.up(ids), plan.down(ids)))
    assert up.tolist() == [total.up[who] for who in ids]
    assert down.tolist() == [total.down[who] + NOTICE for who in ids]


def test_where_the_plan_fails_nobody_is_introduced():
    nodes = SimulatedNodes(NodePolicy(), seed=0)
    plan = plan_sum(make_sum_terms(nodes.run, 1, 1, range(10), 9, 21), NOTICE, range(10), range(4))
    total = OneProcessSum(plan, nodes)
    upload_all(total, 21, 9)
    assert (total.server, sum(total.down.values())) == (None, 0)


def test_a_count_that_is_wrong_is_found():
    nodes = SimulatedNodes(NodePolicy(), seed=0)
    plan = plan_sum(make_sum_terms(nodes.run, 1, 1, range(5), 9, 21), NOTICE, range(5), [])
    total = OneProcessSum(plan, nodes)
    upload_all(total, 21, 9)
    total.up[3] += 1
    with pytest.raises(SparingError, match=r"counted .* client 3 sent .*; this is a bug, please report it"):
        total.unmasked()


FAILING = {
    2: "",
    3: "6 neighbours of client 3 arrive, where 7 are needed",  # nobody holds a share of its own secrets
    4: "6 of 10 clients arrive, where 7 are needed",
}


@pytest.mark.parametrize("lost", FAILING)
def test_too_few_uploads_fail(lost):
    terms = make_sum_terms(bytes(16), 1, 1, range(10), 5, 21)
    assert plan_sum(terms, NOTICE, range(10), range(lost)).fails == FAILING[lost]


def test_who_has_too_few_neighbours_makes_the_sum_fail_or_is_left_out():
    terms = make_sum_terms(bytes(16), 1, 1, range(60), 5, 21, degree=6, threshold=4, least=20)
    near = neighbours_of_all(terms)[7]
    assert plan_sum(terms, NOTICE, range(60), near[:2]).fails == ""
    assert "neighbours of client" in plan_sum(terms, NOTICE, range(60), near[:3]).fails
    here = set(range(60)) - set(near[:3])
    plan = plan_sum(terms, NOTICE, here, [])
    assert 7 not in plan.introduced
    assert int(plan.up([7])["value"][0]) == 0 < int(plan.up([7])["shares"][0])


def test_who_is_absent_costs_nothing_and_who_is_lost_no_upload():
    terms = make_sum_terms(bytes(16), 1, 1, range(10), 100, 21)
    plan = plan_sum(terms, NOTICE, range(9), [4])
    up, down = plan.up(range(10)), plan.down(range(10))
    assert sum(int(x[9]) for x in up.values()) == 0
    assert int(up["shares"][4]) == int(up["shares"][0]) > 0
    assert int(up["value"][4]) == int(up["unmask"][4]) == int(down["unmask"][4]) == 0
    assert int(up["value"][0]) == 263  # 100 words of 21 bits


@pytest.mark.parametrize(("cohort", "colluding"), [(3, 0), *itertools.product((5, 10), (0, 1, 2))])
def test_nodes_take_part_in_what_settings_give(cohort, colluding):
    """A node insists on the same numbers."""
    settings = SecureSettings(colluding=colluding)
    assert not settings.why_too_few(cohort)
    nodes = SimulatedNodes(settings.policy, seed=0)
    total = OneProcessSum(
        plan_sum(settings.terms(nodes.run, 1, 1, range(cohort), 3, 21), NOTICE, range(cohort), []), nodes
    )
    upload_all(total, 21, 3)
    total.unmasked()
    strict = SimulatedNodes(settings._replace(clients=cohort + 1).policy, seed=0)
    plan = plan_sum(settings.terms(strict.run, 1, 1, range(cohort), 3, 21), NOTICE, range(cohort), [])
    with pytest.raises(SecureError, match="this node wants"):
        OneProcessSum(plan, strict)
