"""A server that lies: each time the node refuses, or the server gets nothing by it."""

import itertools

import numpy as np
import pytest
from scipy.stats import chisquare

from secure.parties import (
    RUN,
    Client,
    make_clients,
    plain_sum,
    prepared_sum,
    random_values,
    terms_of,
    uploaded_sum,
)
from sparing.core.errors import SecureError
from sparing.secure import sum_client
from sparing.secure.bit_packing import unpack_words
from sparing.secure.derived_keys import pair_mask_key, seed_commitment, signed_statement
from sparing.secure.long_term import KeyRoster, PublicKeys, new_node_keys
from sparing.secure.lying_server import fewest_summed
from sparing.secure.mask_graph import neighbours_of_all, points_of_shares
from sparing.secure.masks import add_mask
from sparing.secure.node_rules import Bound, NodePolicy
from sparing.secure.primitives import ed25519_sign, secret_bytes, x25519_key, x25519_public
from sparing.secure.shamir import rebuild_secret
from sparing.secure.sum_messages import (
    Introduced,
    SignedKey,
    UnmaskLists,
    read_introduction,
    read_shares,
    read_upload,
    write_introduction,
    write_unmask,
)
from sparing.secure.sum_server import MaskedSum, read_prepared
from sparing.secure.sum_terms import SumTerms

N = 10
VICTIM = 3


def lists_without(terms: SumTerms, *dropped: int) -> UnmaskLists:
    return UnmaskLists(frozenset(terms.cohort) - set(dropped), frozenset(dropped))


def asked(client: Client, terms: SumTerms, lists: UnmaskLists) -> dict[int, int]:
    answer = client.unmask(write_unmask(terms, client.number, lists))
    return read_shares(answer, terms, client.number, neighbours_of_all(terms)[client.number])


def shares_of_victim(clients, terms, lists_of) -> dict[int, int]:
    """Point -> share, from everybody but the victim."""
    points = points_of_shares(terms)
    return {
        points[who]: asked(one, terms, lists_of(who))[VICTIM] for who, one in clients.items() if who != VICTIM
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize("told", range(N))
def test_different_lists_never_give_both_secrets(told):
    """Some are told that the victim survived, the others that it dropped out."""
    clients = make_clients(N)
    terms = terms_of(clients)
    uploaded_sum(clients, terms, random_values(terms, 0))
    others = [who for who in clients if who != VICTIM]
    survived = set(others[:told])
    shares = shares_of_victim(
        clients, terms, lambda who: lists_without(terms) if who in survived else lists_without(terms, VICTIM)
    )
    state = clients[VICTIM].state
    assert state is not None
    points, got = points_of_shares(terms), []
    for kind, holders in ((state.seed, survived), (state.private, set(others) - survived)):
        held = {points[who]: shares[points[who]] for who in holders}
        got.append(any(rebuilds(kind, some) for some in itertools.combinations(held.items(), terms.threshold)))
        if len(held) < terms.threshold and held:
            assert not rebuilds(kind, held.items())
    assert got == [told >= terms.threshold, N - 1 - told >= terms.threshold]
    assert sum(got) <= 1


def rebuilds(secret: bytes, shares) -> bool:
    try:
        return rebuild_secret(dict(shares)) == secret
    except SecureError:
        return False


def test_a_late_upload_stays_masked():
    """The victim uploaded, the server says it did not, and has its fresh key: the self mask is still there."""
    clients = make_clients(N)
    terms = terms_of(clients, size=50_000, bits=16)
    values = random_values(terms, 0)
    total = prepared_sum(clients, terms)
    uploads = {who: one.upload(total.introduction(who), values[who]) for who, one in clients.items()}
    shares = shares_of_victim(clients, terms, lambda who: lists_without(terms, VICTIM))
    private = rebuild_secret(dict(list(shares.items())[: terms.threshold]))
    assert private == clients[VICTIM].state.private  # type: ignore[union-attr]
    bare = unpack_words(read_upload(uploads[VICTIM], terms, VICTIM), terms.size, terms.bits)
    for who in total.near[VICTIM]:
        key = pair_mask_key(terms, x25519_key(private), total.prepared[who].key.fresh, VICTIM, who)
        add_mask(bare, key, -1 if who > VICTIM else 1)
    left = bare - values[VICTIM].astype(bare.dtype)
    assert chisquare(np.bincount(left & 255, minlength=256)).pvalue > 1e-9
    assert chisquare(np.bincount(bare & 255, minlength=256)).pvalue > 1e-9


@pytest.mark.parametrize(
    ("survivors", "dropped", "why"),
    [
        (set(range(N)), {VICTIM}, "survivor and as dropped out"),
        (set(range(N)), set(range(N)), "survivor and as dropped out"),
        ({0, 1, 2, 4, 5, 6}, {3, 7, 8, 9}, "6 survivors, where 7 are the least"),
        (set(), set(range(N)), "0 survivors"),
        (set(range(N)) - {VICTIM}, set(), "wrong about client 3"),
        (set(range(N)) - {0}, set(), "wrong about client 0"),
        (set(), set(), "wrong about"),
    ],
)
def test_lists_that_are_refused(survivors, dropped, why):
    clients = make_clients(N)
    terms = terms_of(clients)
    uploaded_sum(clients, terms, random_values(terms, 0))
    bound = clients[0].bound
    with pytest.raises(SecureError, match=why):
        asked(clients[0], terms, UnmaskLists(frozenset(survivors), frozenset(dropped)))
    assert clients[0].bound == bound


def test_lists_with_somebody_who_was_not_introduced():
    clients = make_clients(N)
    terms = terms_of(clients)
    total = prepared_sum(clients, terms, gone=[VICTIM])
    clients[0].upload(total.introduction(0), random_values(terms, 0)[0])
    for lists in (lists_without(terms), lists_without(terms, VICTIM)):
        with pytest.raises(SecureError, match="wrong about client 3"):
            asked(clients[0], terms, lists)


def test_a_surrounded_client_of_a_sparse_graph():
    """Survivors enough in all, but not around the client."""
    clients = make_clients(60)
    terms = terms_of(clients, size=1, degree=20)
    uploaded_sum(clients, terms, random_values(terms, 0))
    with pytest.raises(SecureError, match="13 survivors around client 0; at least 14"):
        asked(clients[0], terms, lists_without(terms, *neighbours_of_all(terms)[0][:8]))


# ----------------------------------------------------------------------------------------------------------- replays


def test_one_list_of_one_attempt_in_a_round():
    clients = make_clients(N)
    first = terms_of(clients)
    values = random_values(first, 0)
    uploaded_sum(clients, first, values)
    node = clients[0]
    one = asked(node, first, lists_without(first, 9))
    assert asked(node, first, lists_without(first, 9)) == one
    for other in (lists_without(first), lists_without(first, 8), lists_without(first, 8, 9)):
        with pytest.raises(SecureError, match="another list of survivors"):
            asked(node, first, other)
    with pytest.raises(SecureError, match="unmasked by this node already"):
        node.prepare(terms_of(clients, attempt=2))
    assert asked(node, first, lists_without(first, 9)) == one


def test_two_attempts_are_open_and_one_is_answered():
    """What is durable decides, even where the node has kept the secrets of both."""
    clients = make_clients(N)
    terms, states = [terms_of(clients, attempt=attempt) for attempt in (1, 2)], []
    for one in terms:
        uploaded_sum(clients, one, random_values(one, 0))
        states.append(clients[0].state)
    clients[0].state = states[0]
    asked(clients[0], terms[0], lists_without(terms[0]))
    clients[0].state = states[1]
    with pytest.raises(SecureError, match="another list of survivors"):
        asked(clients[0], terms[1], lists_without(terms[1]))


def test_the_same_attempt_prepared_twice_is_unmasked_once():
    """A node that lost its state prepares again; had it kept both, it would still answer for one."""
    clients = make_clients(N)
    terms = terms_of(clients)
    uploaded_sum(clients, terms, random_values(terms, 0))
    before = clients[0].state
    uploaded_sum(clients, terms, random_values(terms, 0))
    asked(clients[0], terms, lists_without(terms))
    clients[0].state = before
    with pytest.raises(SecureError, match="another list of survivors"):
        asked(clients[0], terms, lists_without(terms))


def test_half_in_one_attempt_and_half_in_another_is_no_sum():
    clients = make_clients(N)
    terms = [terms_of(clients, attempt=attempt) for attempt in (1, 2)]
    totals, states = [], []
    for one in terms:
        totals.append(uploaded_sum(clients, one, random_values(one, 0)))
        states.append({who: client.state for who, client in clients.items()})
    for who, client in clients.items():
        for total, state in zip(totals, states, strict=True):
            client.state = state[who]
            answers = who % 2 == totals.index(total)
            if answers:
                total.hear(who, client.unmask(total.request(who)))
    for total in totals:
        assert len(total.missing()) == N
        with pytest.raises(SecureError, match="lacks shares of 10 clients"):
            total.unmasked()


def test_rounds_only_go_forward():
    clients = make_clients(N)
    old = terms_of(clients, t=1)
    uploaded_sum(clients, old, random_values(old, 0))
    state = clients[0].state
    clients[0].prepare(terms_of(clients, t=2))
    with pytest.raises(SecureError, match="rounds only go forward"):
        clients[0].prepare(terms_of(clients, t=1, attempt=2))
    clients[0].state = state
    with pytest.raises(SecureError, match="this node is in round 2"):
        asked(clients[0], old, lists_without(old))


def test_a_request_of_another_attempt_or_client():
    clients = make_clients(N)
    terms, other = terms_of(clients), terms_of(clients, attempt=2)
    uploaded_sum(clients, terms, random_values(terms, 0))
    with pytest.raises(SecureError, match="another sum"):
        asked(clients[0], other, lists_without(other))
    with pytest.raises(SecureError, match="of client 1 where one of client 0"):
        clients[0].unmask(write_unmask(terms, 1, lists_without(terms)))


def test_another_cohort_in_a_later_attempt():
    """Else two sums of one round could differ by one client: each would have share holders of its own."""
    clients = make_clients(N + 2)
    clients[0].prepare(terms_of(range(N)))
    with pytest.raises(SecureError, match="another cohort in an earlier attempt"):
        clients[0].prepare(terms_of([*range(N - 1), N], attempt=2))
    clients[0].prepare(terms_of(range(N), attempt=2))


def test_another_run():
    clients = make_clients(4)
    clients[0].bound = Bound(bytes(16))
    with pytest.raises(SecureError, match="a sum of run 00010203, where this node takes part in 00000000"):
        clients[0].prepare(terms_of(clients))


# ----------------------------------------------------------------------------------------------------- introductions


def introduced_with(total, client: int, changed: dict[int, Introduced | None]) -> bytes:
    near = neighbours_of_all(total.terms)[client]
    others = read_introduction(total.introduction(client), total.terms, client, near) | changed
    return write_introduction(total.terms, client, near, {who: one for who, one in others.items() if one is not None})


def of_the_server(terms: SumTerms, client: int, signing: bytes) -> SignedKey:
    """A fresh key whose private part the server knows."""
    fresh, commitment = x25519_public(secret_bytes()), seed_commitment(terms, secret_bytes(), client)
    return SignedKey(fresh, commitment, ed25519_sign(signing, signed_statement(terms, client, fresh, commitment)))


def test_substituted_keys():
    clients = make_clients(N)
    terms, later = terms_of(clients), terms_of(clients, t=2)
    old = prepared_sum(clients, terms)
    total = prepared_sum(clients, later)
    true = total.prepared[VICTIM]
    wrong = {
        "own": of_the_server(later, VICTIM, secret_bytes()),
        "of another client": total.prepared[5].key,
        "of another round": old.prepared[VICTIM].key,
        "other key, old signature": of_the_server(later, VICTIM, secret_bytes())._replace(signature=true.key.signature),
        "other commitment": true.key._replace(commitment=bytes(32)),
    }
    for key in wrong.values():
        data = introduced_with(total, 0, {VICTIM: Introduced(key, true.boxes[0])})
        with pytest.raises(SecureError, match="fresh key of client 3 in round 2, attempt 1 is not signed"):
            clients[0].upload(data, random_values(later, 0)[0])
    assert clients[0].state.upload == b""  # type: ignore[union-attr]


def test_who_was_told_something_else_is_a_stranger():
    clients = make_clients(N)
    terms, other = terms_of(clients), terms_of(clients, about=bytes(31) + b"1")
    message = clients[VICTIM].prepare(other)
    lied = message[:12] + terms.digest + message[44:]
    with pytest.raises(SecureError, match="another sum than round 1"):
        read_prepared(terms, clients[0].roster, VICTIM, message)
    with pytest.raises(SecureError, match="the fresh key of client 3 in round 1 is not signed"):
        read_prepared(terms, clients[0].roster, VICTIM, lied)


def test_a_prepare_message_of_another_round_or_attempt():
    clients = make_clients(N)
    message = clients[0].prepare(terms_of(clients))
    for terms in (terms_of(clients, t=2), terms_of(clients, attempt=2), terms_of(clients, bits=22)):
        with pytest.raises(SecureError, match="another sum"):
            read_prepared(terms, clients[0].roster, 0, message)


def test_invented_clients():
    clients = make_clients(N)
    with pytest.raises(SecureError, match="client 10, who is not in this node's key roster"):
        clients[0].prepare(terms_of(range(N + 1)))
    other = KeyRoster({who: new_node_keys().public() for who in clients})
    with pytest.raises(SecureError, match="not in the cohort"):
        clients[0].prepare(terms_of(range(1, N)))
    clients[4].roster = other
    with pytest.raises(SecureError, match="not those of the key roster"):
        clients[4].prepare(terms_of(clients))


def test_one_key_for_two_clients():
    one, two = new_node_keys().public(), new_node_keys().public()
    for twin in (one, PublicKeys(one.signing, two.sharing), PublicKeys(two.signing, one.sharing)):
        with pytest.raises(SecureError, match="clients 0 and 1 of the key roster have one"):
            KeyRoster({0: one, 1: twin})
    with pytest.raises(SecureError, match="no X25519 public key that hides anything"):
        KeyRoster({0: one, 1: PublicKeys(two.signing, bytes(32))})


@pytest.mark.parametrize(
    ("policy", "n", "other", "why"),
    [
        (NodePolicy(clients=11), 10, {}, "this node wants 11 at least"),
        (NodePolicy(clients=8), 10, {}, "10 clients and unmasks the sum of 7; this node wants 8"),
        (NodePolicy(colluding=5), 10, {}, "5 who collude"),
        (NodePolicy(), 60, {"degree": 10}, "10 neighbours; this node wants 20"),
        (NodePolicy(colluding=2), 60, {"threshold": 11}, "threshold of 11 of 20 shares, which 2"),
    ],
)
def test_what_a_node_insists_on(policy, n, other, why):
    clients = make_clients(n, policy)
    with pytest.raises(SecureError, match=why):
        clients[0].prepare(terms_of(clients, **other))
    assert clients[0].bound == Bound(RUN)


def test_terms_that_protect_nobody():
    clients = make_clients(N)
    good = terms_of(clients)
    for wrong in ({"threshold": 4}, {"threshold": 1}, {"least": 2}, {"degree": 2, "threshold": 2}, {"cohort": (0, 1)}):
        with pytest.raises(SecureError):
            clients[0].prepare(good._replace(**wrong))


def test_too_few_are_introduced():
    clients = make_clients(N)
    terms = terms_of(clients)
    total = prepared_sum(clients, terms)
    data = introduced_with(total, 0, dict.fromkeys((1, 2, 3)))
    with pytest.raises(SecureError, match="6 neighbours of client 0 prepared in round 1, where the threshold needs 7"):
        clients[0].upload(data, random_values(terms, 0)[0])


def test_a_second_introduction_or_other_values():
    """The difference of two uploads would be one pair's mask, or the difference of the values."""
    clients = make_clients(N)
    terms = terms_of(clients)
    total, values = prepared_sum(clients, terms), random_values(terms, 0)
    upload = clients[0].upload(total.introduction(0), values[0])
    with pytest.raises(SecureError, match="masked round 1, attempt 1 towards others already"):
        clients[0].upload(introduced_with(total, 0, {VICTIM: None}), values[0])
    with pytest.raises(SecureError, match="uploaded other values"):
        clients[0].upload(total.introduction(0), values[1])
    assert clients[0].upload(total.introduction(0), values[0]) == upload


# ------------------------------------------------------------------------------------------------------------ shares


def test_swapped_shares_are_not_given():
    """Boxes of one sender for two receivers, or of two senders for one, changed round."""
    clients = make_clients(N)
    terms = terms_of(clients)
    total, values = prepared_sum(clients, terms), random_values(terms, 0)
    sent = total.prepared
    swaps = {
        0: {VICTIM: Introduced(sent[VICTIM].key, sent[VICTIM].boxes[1])},
        1: {4: Introduced(sent[4].key, sent[5].boxes[1]), 5: Introduced(sent[5].key, sent[4].boxes[1])},
    }
    for who, one in clients.items():
        total.add(who, one.upload(introduced_with(total, who, swaps.get(who, {})), values[who]))
    given = {who: asked(one, terms, lists_without(terms)) for who, one in clients.items()}
    assert VICTIM not in given[0]
    assert not {4, 5} & set(given[1])
    assert all(len(shares) == N - 1 for who, shares in given.items() if who > 1)
    for who, one in clients.items():
        total.hear(who, one.unmask(total.request(who)))
    assert total.unmasked().tolist() == plain_sum(values, clients, terms.bits)


@pytest.mark.parametrize("dropped", [[], [VICTIM]])
def test_a_client_that_gives_wrong_shares_ends_the_sum(dropped):
    clients = make_clients(N)
    terms = terms_of(clients)
    total = uploaded_sum(clients, terms, random_values(terms, 0), gone=dropped)
    for who, one in clients.items():
        answer = bytearray(one.unmask(total.request(who)))
        if who == 0:
            answer[-20] ^= 1  # the share of the last neighbour
            answer[60] ^= 1
        total.hear(who, bytes(answer))
    with pytest.raises(SecureError, match=r"not of what it signed|not of one secret"):
        total.unmasked()


@pytest.mark.parametrize("secret", ["seed", "private"])
def test_a_client_that_shares_out_something_else_ends_the_sum(secret, monkeypatch):
    clients = make_clients(N)
    terms = terms_of(clients)
    true = sum_client.split_secret
    messages = {who: one.prepare(terms) for who, one in clients.items() if who != VICTIM}
    order = iter(["seed", "private"])
    monkeypatch.setattr(
        sum_client, "split_secret", lambda x, *other: true(bytes(32) if next(order) == secret else x, *other)
    )
    messages[VICTIM] = clients[VICTIM].prepare(terms)
    monkeypatch.undo()
    total = MaskedSum(terms, {who: read_prepared(terms, clients[0].roster, who, x) for who, x in messages.items()})
    values = random_values(terms, 0)
    for who in clients:
        upload = clients[who].upload(total.introduction(who), values[who])
        if who != VICTIM or secret == "seed":
            total.add(who, upload)
    for who in clients:
        total.hear(who, clients[who].unmask(total.request(who)))
    with pytest.raises(SecureError, match="the shares of client 3 in round 1 are not of what it signed"):
        total.unmasked()


def test_a_fresh_key_that_hides_nothing():
    clients = make_clients(4)
    terms = terms_of(clients)
    message = bytearray(clients[0].prepare(terms))
    head = len(message) - 128 - 3 * 82
    commitment = bytes(message[head + 32 : head + 64])
    signature = ed25519_sign(clients[0].keys.signing, signed_statement(terms, 0, bytes(32), commitment))
    message[head : head + 32], message[head + 64 : head + 128] = bytes(32), signature
    with pytest.raises(SecureError, match="hides anything"):
        read_prepared(terms, clients[0].roster, 0, bytes(message))


def test_no_answer_before_an_introduction():
    clients = make_clients(4)
    terms = terms_of(clients)
    clients[0].prepare(terms)
    with pytest.raises(SecureError, match="introduced to nobody"):
        asked(clients[0], terms, lists_without(terms))


def test_secrets_are_not_printed():
    clients = make_clients(3)
    clients[0].prepare(terms_of(clients))
    state, keys = clients[0].state, clients[0].keys
    text = f"{state} {state!r} {keys} {keys!r}"
    assert state is not None
    assert not any(
        secret.hex()[:8] in text or str(secret)[2:10] in text for secret in (state.seed, state.private, *keys)
    )


# ------------------------------------------------------------------------------------------------- whose sum, at worst


@pytest.mark.parametrize(
    ("n", "threshold", "least", "colluding"),
    [(4, 2, 3, 0), (4, 3, 3, 0), (4, 2, 4, 0), (5, 4, 4, 0), (4, 3, 3, 1), (5, 3, 4, 1), (5, 4, 4, 2)],
)
def test_no_lists_give_a_sum_of_fewer(n, threshold, least, colluding):
    """All lists that a server could send, each node's its own, and every set whose sum it could then unmask."""
    honest = n - colluding
    options = [list(_lists(n, who, threshold, least)) for who in range(honest)]
    fewest = n
    for told in itertools.product(*options):
        sums = _sums(n, threshold, told)
        smallest = [one for one in sums if not any(other < one for other in sums)]
        assert all(one.isdisjoint(other) for one, other in itertools.combinations(smallest, 2))
        fewest = min([fewest, *map(len, smallest)])
    assert fewest_summed(n, threshold, least, colluding) <= fewest <= least


def _lists(n: int, who: int, threshold: int, least: int):
    """What a node can be told: of each other client whether it survived (1), dropped out (-1) or never prepared (0)."""
    for told in itertools.product((1, -1, 0), repeat=n):
        introduced = sum(map(abs, told)) - abs(told[who])
        if told[who] and told.count(1) >= least and introduced >= threshold:
            yield told


def _sums(n: int, threshold: int, told: tuple[tuple[int, ...], ...]) -> list[set[int]]:
    """Sets of honest clients with self masks known, masks within that cancel, and masks towards other honest ones
    known; the last clients collude, and give both shares."""
    honest = range(len(told))
    needed = threshold - (n - len(told))
    seeds, keys = ([sum(told[v][u] == kind for v in honest if v != u) >= needed for u in honest] for kind in (1, -1))
    found = []
    for size in range(1, len(told) + 1):
        for chosen in map(set, itertools.combinations([u for u in honest if seeds[u]], size)):
            others = {u for v in chosen for u in honest if told[v][u] and u not in chosen}
            cancels = all(bool(told[u][v]) == bool(told[v][u]) for u, v in itertools.combinations(chosen, 2))
            if cancels and all(keys[u] for u in others):
                found.append(chosen)
    return found


def test_a_least_by_which_lists_could_single_out_a_few():
    """50 clients, of whom 5 collude: with 33 survivors in every list a lying server could still get the sum of two."""
    clients = make_clients(50, NodePolicy(clients=20, colluding=5))
    with pytest.raises(SecureError, match="by lying a server could make it that of 2; this node wants 20"):
        clients[0].prepare(terms_of(clients, least=33))
    clients[0].prepare(terms_of(clients, clients=20, colluding=5))


def test_a_node_that_is_never_asked_to_unmask_is_not_singled_out():
    """14 clients, of whom 4 collude: the victim is told of 5 and those 4, and each of the 5 is called a survivor by so
    few that its fresh key can be rebuilt. Lists of survivors are long, but the victim gets none."""
    clients = make_clients(14, NodePolicy(clients=3, colluding=4))
    terms = terms_of(clients, clients=3, colluding=4)
    assert (terms.threshold, terms.least) == (9, 11)
    victim, dropped, hidden = 0, range(1, 6), range(6, 10)
    total = prepared_sum(clients, terms)
    data = introduced_with(total, victim, dict.fromkeys(hidden))
    with pytest.raises(SecureError, match="9 others prepared in round 1, where a sum of 11 needs 10"):
        clients[victim].upload(data, random_values(terms, 0)[victim])
    assert len(dropped) * (len(clients) - 2 - terms.threshold) >= 4 * 2 + 5 * 1  # so their fresh keys could be had
