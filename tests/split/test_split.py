"""Partitions: every sample once, nobody empty, the same for the same seed."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.errors import ConfigError
from sparing.split import dirichlet_split, iid_split, split_train_test

LABELS = st.lists(st.integers(0, 4), min_size=1, max_size=120)
SEEDS = st.integers(0, 2**32)


def whole(parts, n):
    return np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))


@given(labels=LABELS, seed=SEEDS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_iid_deals_out_everything_evenly(labels, seed, data):
    clients = data.draw(st.integers(1, len(labels)))
    parts = iid_split(labels, clients, seed)
    sizes = [len(part) for part in parts]
    assert whole(parts, len(labels))
    assert len(parts) == clients
    assert max(sizes) - min(sizes) <= 1
    assert all(np.array_equal(a, b) for a, b in zip(parts, iid_split(labels, clients, seed), strict=True))


@given(labels=LABELS, seed=SEEDS, alpha=st.floats(1e-300, 1e6), data=st.data())
@settings(max_examples=100, deadline=None)
def test_dirichlet_deals_out_everything_and_leaves_nobody_short(labels, seed, alpha, data):
    least = data.draw(st.integers(1, len(labels)))
    clients = data.draw(st.integers(1, len(labels) // least))
    parts = dirichlet_split(labels, clients, alpha, seed, least)
    assert whole(parts, len(labels))
    assert len(parts) == clients
    assert min(len(part) for part in parts) >= least
    assert all(
        np.array_equal(a, b) for a, b in zip(parts, dirichlet_split(labels, clients, alpha, seed, least), strict=True)
    )


@given(labels=LABELS, seed=SEEDS, share=st.floats(0, 0.999), data=st.data())
@settings(max_examples=60, deadline=None)
def test_train_test_cut_keeps_everything_and_one_to_train_on(labels, seed, share, data):
    parts = iid_split(labels, data.draw(st.integers(1, len(labels))), seed)
    train, test = split_train_test(labels, parts, seed, share)
    for part, a, b in zip(parts, train, test, strict=True):
        assert np.array_equal(np.sort(np.concatenate([a, b])), part)
        assert len(a) >= 1
        assert len(b) <= share * len(part) + 1
        for label in set(labels):
            mine = np.asarray(labels)
            assert abs((mine[b] == label).sum() - share * (mine[part] == label).sum()) < 2


def test_alpha_is_skew():
    labels = np.arange(2000) % 10

    def most(alpha):
        return np.mean(
            [np.bincount(labels[part]).max() / len(part) for part in dirichlet_split(labels, 10, alpha, seed=0)]
        )

    assert most(0.05) > 0.5 > most(1.0) > 0.15 > most(1e4)


def test_splits_are_the_same_everywhere():
    """Fingerprints written down once: another machine or numpy that disagrees would silently change every study."""
    labels = np.arange(500) % 7
    seen = [
        iid_split(labels, 9, 3),
        dirichlet_split(labels, 9, 0.3, 3),
        *split_train_test(labels, iid_split(labels, 9, 3), 3),
    ]
    prints = [hashlib.sha256(np.concatenate(p).astype("<i8").tobytes()).hexdigest()[:8] for p in seen]
    assert prints == FINGERPRINTS


FINGERPRINTS = ["e8498c13", "6ba1cc47", "68dc0479", "1b7dcf30"]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: iid_split([0, 1], 3, 0), "3 clients with at least 1 samples each need 3 samples, seen 2: take fewer"),
        (lambda: dirichlet_split([0] * 5, 3, 1.0, 0), "3 clients with at least 2 samples each need 6 samples, seen 5"),
        (lambda: dirichlet_split([0] * 9, 3, 0.0, 0), "alpha > 0, seen 0.0"),
        (lambda: dirichlet_split([0] * 9, 3, float("nan"), 0), "alpha > 0, seen nan"),
        (lambda: dirichlet_split([0] * 9, 3, 1.0, 0, least=0), "no client may stay empty, seen least=0"),
        (lambda: iid_split([0, 1], 0, 0), "at least one client, seen 0"),
        (lambda: iid_split(np.zeros((2, 2)), 1, 0), r"one label per sample, seen labels of shape \(2, 2\)"),
        (lambda: split_train_test([0, 1], [np.arange(2)], 0, test=1.0), r"test share must be in \[0, 1\), seen 1.0"),
    ],
)
def test_splits_that_cannot_be_meant(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call()
