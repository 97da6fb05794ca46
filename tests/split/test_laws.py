"""The laws: sizes and classes as asked, every sample once, nobody empty, the same in another process."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.errors import ConfigError
from sparing.split import dirichlet_split, label_quantity_split, pathological_split, quantity_split
from sparing.split.dealing import apportion
from sparing.split.natural_ids import choose_natural_ids, owner_by_id
from sparing.split.train_test import deal_in_proportion

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=120).map(np.array)
SEEDS = st.integers(0, 2**63 - 1)


def whole(parts, n):
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@given(per_class=st.lists(st.integers(12, 30), min_size=1, max_size=6), seed=SEEDS, data=st.data())
@settings(max_examples=80, deadline=None)
def test_pathological_gives_each_client_so_many_classes_in_even_pieces(per_class, seed, data):
    labels = np.repeat(np.arange(len(per_class)), per_class)
    classes = data.draw(st.integers(1, len(per_class)))
    clients = data.draw(st.integers(-(-len(per_class) // classes), 12))
    parts = pathological_split(labels, clients, classes, seed)
    assert len(parts) == clients
    assert whole(parts, len(labels))
    for part in parts:
        assert len(np.unique(labels[part])) == classes
    for label in range(len(per_class)):
        pieces = [n for part in parts if (n := np.count_nonzero(labels[part] == label))]
        assert max(pieces) - min(pieces) <= 1


def test_pathological_gives_large_classes_more_holders():
    labels = np.repeat([0, 1], [900, 100])
    parts = pathological_split(labels, clients=10, classes=1, seed=0)
    assert sum(labels[part[0]] == 0 for part in parts) == 9
    assert [len(part) for part in parts] == [100] * 10


@given(labels=LABELS, seed=SEEDS, a=st.floats(0, 5), data=st.data())
@settings(max_examples=80, deadline=None)
def test_quantity_follows_the_power_law_within_one_sample(labels, seed, a, data):
    clients = data.draw(st.integers(1, len(labels)))
    parts = quantity_split(labels, clients, a, seed)
    sizes = np.array([len(part) for part in parts])
    assert whole(parts, len(labels))
    assert sizes.min() >= 1
    assert (np.diff(sizes) <= 0).all()
    exact = np.arange(1, clients + 1) ** -a
    exact *= len(labels) / exact.sum()
    if exact.min() >= 1:
        assert np.abs(sizes - exact).max() < 1


def test_fifty_clients_with_sizes_like_one_over_k():
    sizes = [len(part) for part in quantity_split(np.zeros(60_000), 50, 1.0, seed=0)]
    harmonic = (1 / np.arange(1, 51)).sum()
    assert sizes == pytest.approx(60_000 / harmonic / np.arange(1, 51), abs=1)


@given(labels=LABELS, seed=SEEDS, alpha=st.floats(1e-300, 1e4), a=st.floats(0, 3), data=st.data())
@settings(max_examples=80, deadline=None)
def test_label_quantity_has_exact_sizes_and_every_sample(labels, seed, alpha, a, data):
    clients = data.draw(st.integers(1, len(labels)))
    parts = label_quantity_split(labels, clients, alpha, a, seed)
    assert whole(parts, len(labels))
    assert [len(part) for part in parts] == [len(part) for part in quantity_split(labels, clients, a, seed)]


def test_label_quantity_leans_to_a_few_labels_where_alpha_is_small():
    labels = np.arange(5000) % 10

    def most(alpha):
        parts = label_quantity_split(labels, 25, alpha, 1.0, seed=1)
        return np.mean([np.bincount(labels[part]).max() / len(part) for part in parts])

    assert most(0.05) > 0.6 > most(1.0) > 0.2 > most(1e4)


@given(n=st.integers(0, 500), weight=st.lists(st.floats(0.01, 100), min_size=1, max_size=30), data=st.data())
@settings(max_examples=100, deadline=None)
def test_apportioned_adds_up_and_stays_within_one(n, weight, data):
    weight = np.array(weight)
    least = data.draw(st.integers(0, n // len(weight)))
    got = apportion(n, weight, least)
    assert got.sum() == n
    assert got.min() >= least
    assert np.abs(apportion(n, weight) - n * weight / weight.sum()).max() < 1 + 1e-6


@given(ids=st.lists(st.integers(-1, 9), min_size=1, max_size=60).map(np.array), least=st.integers(1, 4), seed=SEEDS)
@settings(max_examples=80, deadline=None)
def test_natural_ids_become_clients_if_large_enough(ids, least, seed):
    able = [i for i in range(10) if np.count_nonzero(ids == i) >= least]
    if not able:
        with pytest.raises(ConfigError, match=f"0 of .* ids have {least} samples or more"):
            choose_natural_ids(ids, None, seed, least)
        return
    assert choose_natural_ids(ids, None, seed, least).tolist() == able
    some = choose_natural_ids(ids, (len(able) + 1) // 2, seed, least)
    assert set(some.tolist()) <= set(able)
    assert len(some) == (len(able) + 1) // 2
    owner = owner_by_id(ids, some)
    assert np.array_equal(owner >= 0, np.isin(ids, some))
    assert np.array_equal(some[owner[owner >= 0]], ids[owner >= 0])


def test_natural_picks_at_random_or_the_largest():
    ids = np.repeat(np.arange(30), np.arange(1, 31))
    assert choose_natural_ids(ids, 3, seed=0, pick="largest").tolist() == [27, 28, 29]
    assert len({tuple(choose_natural_ids(ids, 3, seed=seed)) for seed in range(20)}) > 15


@given(labels=LABELS, more=LABELS, seed=SEEDS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_follow_keeps_class_proportions_within_one_sample(labels, more, seed, data):
    clients = data.draw(st.integers(1, len(labels)))
    parts = dirichlet_split(labels, clients, 0.3, seed, least=1)
    dealt = deal_in_proportion(labels, parts, more, seed)
    known = np.flatnonzero(np.isin(more, labels))
    assert np.array_equal(np.sort(np.concatenate(dealt)), known)
    for part, new in zip(parts, dealt, strict=True):
        for label in np.unique(more[known]):
            share = np.count_nonzero(labels[part] == label) / np.count_nonzero(labels == label)
            got, due = np.count_nonzero(more[new] == label), share * np.count_nonzero(more == label)
            assert abs(got - due) < 1


def test_follow_keeps_totals_too():
    """Each of 100 clients is due 1/10 of a sample of every class: together one, not zero or three."""
    labels = np.repeat(np.arange(10), 1000)
    parts = [np.arange(k, 10_000, 100) for k in range(100)]
    dealt = deal_in_proportion(labels, parts, np.repeat(np.arange(10), 10), seed=0)
    assert [len(part) for part in dealt] == [1] * 100


PRINTS = """
import hashlib, numpy as np, torch
from sparing.data.dataset import Dataset
from sparing.split import partition_dataset
n = 600
groups = {"writer": torch.arange(n) % 11, "superclass": torch.arange(n) % 7 // 3}
data = Dataset("toy", torch.zeros(n, 1, 2, 2), torch.arange(n) % 7, 7, torch.arange(n) % 5 == 0, groups)
laws = ["iid", {"dirichlet": 0.1}, {"pathological": 2}, {"quantity": 1.0}, {"label-quantity": {"alpha": 0.3, "a": 1.0}},
        "styles", "writer", "superclass"]
for law in laws:
    clients = {"writer": 5, "superclass": None}.get(str(law), 9)
    p = partition_dataset(data, law, clients, seed=3, validation=0.2, held_out=2)
    flat = np.concatenate([*p.train, *p.test, *p.validation, p.held_out, [len(part) for part in p.train]])
    print(hashlib.sha256(flat.astype("<i8").tobytes()).hexdigest()[:8])
"""


def test_the_same_split_in_two_processes_and_for_ever():
    """Fingerprints written down once: a machine or numpy that disagrees would silently change every study."""
    run = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True)
    assert run.stdout.split() == FINGERPRINTS


FINGERPRINTS = ["53798e6a", "e7626439", "7a34d9fb", "d00cdbba", "a479f827", "53798e6a", "786f94d3", "065207ec"]


def test_another_seed_is_another_split():
    labels = np.arange(300) % 5
    for law in (
        lambda seed: pathological_split(labels, 10, 2, seed),
        lambda seed: quantity_split(labels, 10, 1.0, seed),
        lambda seed: label_quantity_split(labels, 10, 0.3, 1.0, seed),
    ):
        prints = {hashlib.sha256(np.concatenate(law(seed)).tobytes()).hexdigest() for seed in range(5)}
        assert len(prints) == 5


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: pathological_split([0, 1, 2] * 9, 4, 5, 0), "asks for 5 classes per client, but there are 3"),
        (lambda: pathological_split([0, 1, 2] * 9, 4, 0, 0), "at least one class per client, seen 0"),
        (lambda: pathological_split(list(range(10)), 2, 2, 0), "2 clients with 2 classes each hold 4 of 10 classes"),
        (lambda: pathological_split([0] * 50 + [1], 10, 2, 0), "the smallest class has 1 samples"),
        (lambda: quantity_split([0] * 9, 3, -1.0, 0), "a power law of sizes needs a >= 0, seen -1.0"),
        (lambda: quantity_split([0] * 9, 3, float("nan"), 0), "needs a >= 0, seen nan"),
        (
            lambda: quantity_split([0] * 9, 10, 1.0, 0),
            "10 clients with at least 1 samples each need 10 samples, seen 9",
        ),
        (lambda: label_quantity_split([0] * 9, 3, 0.0, 1.0, 0), "label-quantity needs alpha > 0, seen 0.0"),
        (
            lambda: choose_natural_ids(np.array([1, 1, 2]), 3, 0),
            "2 of 2 group ids have 1 samples or more, seen clients=3",
        ),
        (
            lambda: choose_natural_ids(np.array([1, 1, 2]), 1, 0, pick="best"),
            "pick is 'best'; it must be one of random, largest",
        ),
        (lambda: choose_natural_ids(np.array([1, 1, 2]), 1, 0, least=0), "no client may stay empty, seen least=0"),
    ],
)
def test_laws_that_cannot_be_meant(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call()
