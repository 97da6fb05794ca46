"""Partitions of a dataset: official tests dealt alike, validation, held-out clients, lists, and what is refused."""

import json
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparing.core.errors import ConfigError
from sparing.data.dataset import Dataset
from sparing.split import (
    dirichlet_split,
    iid_split,
    partition_dataset,
    split_report,
    split_report_lines,
    split_train_test,
)
from sparing.split.summary import _binomial_deviation

LAWS = ["iid", {"dirichlet": 0.2}, {"pathological": 2}, {"quantity": 1.0}, {"label-quantity": {"alpha": 0.3, "a": 1}}]


def toy(n=240, classes=4, official=0.0, **groups):
    """Images of label, place and group only; the last `official` share is the authors' test part."""
    y = torch.arange(n) % classes
    test = torch.arange(n) >= n - round(official * n) if official else None
    return Dataset("toy", torch.zeros(n, 1, 2, 2), y, classes, test, groups)


def samples(part):
    return np.concatenate([*part.train, *part.test, *part.validation])


@given(
    n=st.integers(40, 150),
    law=st.sampled_from([*LAWS, "styles"]),
    clients=st.integers(2, 8),
    seed=st.integers(0, 2**63 - 1),
    official=st.sampled_from([0.0, 0.3]),
    validation=st.sampled_from([0.0, 0.2]),
)
@settings(max_examples=80, deadline=None)
def test_every_sample_is_in_exactly_one_list(n, law, clients, seed, official, validation):
    data = toy(n, official=official)
    part = partition_dataset(data, law, clients, seed, validation=validation)
    assert len(part) == clients
    assert np.array_equal(np.sort(samples(part)), np.arange(n))
    assert all(len(one) for one in part.train)
    assert part.left_out.tolist() == []
    assert part.global_test is None
    if data.official is not None:
        assert not data.official[np.concatenate([*part.train, *part.validation])].any()
        assert data.official[np.concatenate(part.test)].all()
    assert bool(validation) == any(len(one) for one in part.validation)


@pytest.mark.parametrize("probe", [12, 0.1])
@pytest.mark.parametrize("official", [0.0, 0.3])
@pytest.mark.parametrize("law", [*LAWS, "styles", "role"], ids=str)
def test_what_the_server_keeps_is_no_client_s_and_no_test_data(law, official, probe):
    data = toy(400, official=official, role=torch.arange(400) % 7)
    part = partition_dataset(data, law, None if law == "role" else 6, seed=1, validation=0.2, probe=probe)
    assert len(part.probe) == (12 if probe == 12 else pytest.approx(0.1 * 400 * (1 - official), abs=1))
    assert np.array_equal(np.sort(np.concatenate([samples(part), part.probe])), np.arange(400)), "in one list each"
    assert all(len(one) for one in part.train)
    assert part.left_out.tolist() == []
    assert np.ptp(np.bincount(data.y[part.probe].numpy(), minlength=4)) <= 1, "in everybody's class proportions"
    if data.official is not None:
        assert not data.official[part.probe].any()
    other = partition_dataset(data, law, None if law == "role" else 6, seed=2, probe=probe)
    assert not np.array_equal(other.probe, part.probe)
    assert "probe: " in " ".join(split_report_lines(split_report(part, data)))


def test_who_would_have_nothing_left_beside_the_probe_is_no_client():
    part = partition_dataset(toy(200, role=torch.arange(200) // 2), "role", None, seed=1, probe=0.4)
    assert 0 < len(part) < 100
    assert all(len(one) for one in part.train)


@pytest.mark.parametrize("law", LAWS)
def test_official_tests_have_the_clients_own_class_proportions(law):
    data = toy(1200, official=0.25)
    part = partition_dataset(data, law, 6, seed=2)
    y = data.y.numpy()
    for train, test in zip(part.train, part.test, strict=True):
        mine, exam = np.bincount(y[train], minlength=4), np.bincount(y[test], minlength=4)
        assert np.abs(exam - mine / 3).max() < 1  # 300 to test for 900 to train


@given(share=st.floats(0.05, 0.6), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_validation_is_a_stratified_share_of_train(share, seed):
    data = toy(400)
    plain = partition_dataset(data, {"dirichlet": 0.3}, 5, seed)
    part = partition_dataset(data, {"dirichlet": 0.3}, 5, seed, validation=share)
    y = data.y.numpy()
    for before, train, aside in zip(plain.train, part.train, part.validation, strict=True):
        assert np.array_equal(np.sort(np.concatenate([train, aside])), before)
        assert len(train)
        for label in range(4):
            due = share * np.count_nonzero(y[before] == label)
            assert abs(np.count_nonzero(y[aside] == label) - due) < 2


def test_a_study_keeps_the_split_it_always_had():
    data = toy()
    labels = data.y.numpy()
    for law, parts in (("iid", iid_split(labels, 7, 5)), ({"dirichlet": 0.3}, dirichlet_split(labels, 7, 0.3, 5))):
        part = partition_dataset(data, law, 7, seed=5)
        train, test = split_train_test(labels, parts, 5)
        assert all(map(np.array_equal, part.train, train))
        assert all(map(np.array_equal, part.test, test))


@given(held_out=st.integers(0, 7), seed=st.integers(0, 1000), law=st.sampled_from(LAWS))
@settings(max_examples=40, deadline=None)
def test_held_out_clients_are_named_and_nothing_else_changes(held_out, seed, law):
    data = toy(official=0.2)
    plain, part = partition_dataset(data, law, 8, seed), partition_dataset(data, law, 8, seed, held_out=held_out)
    assert len(np.unique(part.held_out)) == held_out
    assert set(part.held_out.tolist()) <= set(range(8))
    for a, b in ((plain.train, part.train), (plain.test, part.test)):
        assert all(map(np.array_equal, a, b))


def test_held_out_may_be_a_share_and_goes_by_the_seed():
    seen = {tuple(partition_dataset(toy(), "iid", 20, seed, held_out=0.2).held_out) for seed in range(10)}
    assert {len(one) for one in seen} == {4}
    assert len(seen) > 5


def test_groups_with_official_tests_of_their_own():
    role = torch.arange(240) % 3
    data = toy(official=0.25, role=role)
    data.names["role"] = ["hamlet", "ophelia", "ghost"]
    part = partition_dataset(data, "role", None, seed=0)
    assert part.names == ["hamlet", "ophelia", "ghost"]
    for k, (train, test) in enumerate(zip(part.train, part.test, strict=True)):
        assert set(role[train].tolist()) == set(role[test].tolist()) == {k}
    assert len(samples(part)) == 240


def test_unseen_writers_stay_the_global_test():
    writer = torch.where(torch.arange(240) < 180, torch.arange(240) % 6, 100 + torch.arange(240) % 5)
    data = toy(official=0.25, writer=writer)
    part = partition_dataset(data, "writer", None, seed=0)
    assert part.global_test is not None
    assert part.global_test.tolist() == list(range(180, 240))
    assert part.left_out.tolist() == []
    assert np.array_equal(np.sort(samples(part)), np.arange(180))
    for k, (train, test) in enumerate(zip(part.train, part.test, strict=True)):
        assert set(writer[train].tolist()) == set(writer[test].tolist()) == {k}
        assert len(test) == pytest.approx(30 / 4, abs=1)


def test_small_groups_are_left_out_and_said_so():
    subject = torch.tensor([0] * 100 + [1] * 100 + [2] * 36 + [3] * 4)
    data = toy(subject=subject)
    part = partition_dataset(data, {"subject": {"least": 10}}, None, seed=0)
    assert len(part) == 3
    assert part.left_out.tolist() == [236, 237, 238, 239]
    assert "left out: 4 samples" in "\n".join(split_report_lines(split_report(part, data)))
    assert len(partition_dataset(data, {"subject": {"pick": "largest"}}, 2, seed=0)) == 2


def test_text_is_split_by_role_and_stratified_by_its_last_token():
    data = Dataset(
        "text", torch.zeros(60, 5), torch.arange(300).reshape(60, 5) % 7, 7, None, {"role": torch.arange(60) // 20}
    )
    part = partition_dataset(data, "role", None, seed=0)
    assert [len(one) for one in part.train] == [15, 15, 15]
    assert split_report(part, data).counts.sum() == 60


def test_lists_given_outright_and_from_files(tmp_path):
    data, lists = toy(12), [[0, 5, 2], [11, 1, 3, 4]]
    (tmp_path / "lists.json").write_text(json.dumps(lists))
    np.savez(tmp_path / "lists.npz", *map(np.array, lists))
    for given_lists in (lists, str(tmp_path / "lists.json"), tmp_path / "lists.npz"):
        part = partition_dataset(data, {"lists": given_lists}, None, seed=0)
        whole = [np.sort(np.concatenate(two)).tolist() for two in zip(part.train, part.test, strict=True)]
        assert whole == [[0, 2, 5], [1, 3, 4, 11]]
        assert part.left_out.tolist() == [6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "does not hold index lists"),
        ('{"train": [[' + "[" * 500 + "]" * 500 + "]]}", "client 0 must have a list of whole numbers"),
        ('[["' + "a" * 9999 + '", "b"]]', "client 0 must have a list of whole numbers, seen"),
        ("[[0, 1.5]]", "client 0 must have a list of whole numbers"),
        ("[[0, 1000000000000000000000000000000]]", "client 0 must have a list of whole numbers"),
        ("\ufeff[[0, 5, 2], [1, 3]]", None),
    ],
)
def test_lists_of_other_things(tmp_path, text, words):
    path = tmp_path / "lists.json"
    path.write_text(text)
    if words is None:
        assert [
            one.tolist() for one in partition_dataset(toy(12), {"lists": str(path)}, None, seed=0, test=0).train
        ] != []
        return
    with pytest.raises(ConfigError, match=words) as error:
        partition_dataset(toy(12), {"lists": str(path)}, None, seed=0)
    assert len(str(error.value)) < 500


def test_lists_that_tell_train_from_test(tmp_path):
    told = {"train": [[0, 1], [2]], "test": [[3], [4, 5]]}
    np.savez(tmp_path / "told.npz", train_0=[0, 1], train_1=[2], test_0=[3], test_1=[4, 5])
    for given_lists in (told, tmp_path / "told.npz"):
        part = partition_dataset(toy(8), {"lists": given_lists}, 2, seed=0)
        assert [one.tolist() for one in part.train] == told["train"]
        assert [one.tolist() for one in part.test] == told["test"]


def test_lists_over_the_train_part_get_official_tests_dealt():
    part = partition_dataset(toy(40, official=0.5), {"lists": [list(range(10)), list(range(10, 20))]}, None, seed=0)
    assert [len(one) for one in part.train] == [len(one) for one in part.test] == [10, 10]
    part = partition_dataset(toy(8, official=0.5), {"lists": [[0, 1, 4], [2, 3, 5, 6]]}, None, seed=0)
    assert [one.tolist() for one in part.train] == [[0, 1], [2, 3]]
    assert [one.tolist() for one in part.test] == [[4], [5, 6]]
    assert part.left_out.tolist() == [7]


def test_report_counts():
    data = toy(240)
    told = split_report(partition_dataset(data, {"pathological": 1}, 8, seed=0, validation=0.1), data)
    assert told.counts.shape == (4, 8)
    assert told.counts.sum() == told.samples == 240
    assert told.classes.tolist() == [1] * 8
    assert told.sizes.tolist() == [30] * 8
    assert told.skew == pytest.approx(0.75)
    assert told.gini == pytest.approx(0)
    even = split_report(partition_dataset(toy(20_000), "iid", 400, seed=0), toy(20_000))
    assert even.skew == pytest.approx(even.chance, rel=0.05)


@given(n=st.integers(1, 12), first=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_chance_is_the_mean_distance_of_a_random_draw(n, first):
    """For two classes, against the sum over all outcomes."""
    p = first / 10
    draws = np.arange(n + 1)
    weight = np.array([math.comb(n, int(k)) * p**k * (1 - p) ** (n - k) for k in draws])
    assert _binomial_deviation(n, p) == pytest.approx((weight * np.abs(draws / n - p)).sum())


def test_ten_thousand_clients_take_no_time():
    data = toy(70_000, classes=10, official=1 / 7)
    begin = time.process_time()
    part = partition_dataset(data, {"dirichlet": 0.3}, 10_000, seed=0, validation=0.1)
    assert time.process_time() - begin < 2  # a third of a second, on a quiet machine
    assert len(samples(part)) == 70_000


BAD = [
    ("idd", {}, "no split is called 'idd': did you mean 'iid'"),
    ({"iid": None, "dirichlet": 1.0}, {}, "no split is called"),
    ({}, {}, "no split is called"),
    ("writer", {}, "toy has no writer ids to split by; natural ids it has: role"),
    ("dirichlet", {}, "dirichlet needs alpha: write {dirichlet"),
    ({"dirichlet": 0}, {}, "dirichlet needs alpha > 0, seen 0"),
    ({"dirichlet": "much"}, {}, "dirichlet: alpha must be a number, seen 'much'"),
    ({"dirichlet": {"alfa": 1.0}}, {}, "dirichlet has no option 'alfa'; known: alpha, least"),
    ({"dirichlet": {"alpha": 1.0, "least": 2.5}}, {}, "dirichlet: least must be a whole number, seen 2.5"),
    ({"iid": 3}, {}, "iid has no option '3'; it takes none"),
    ({"pathological": 5}, {}, "asks for 5 classes per client, but there are 4"),
    ({"pathological": True}, {}, "classes must be a whole number, seen True"),
    ({"label-quantity": 0.3}, {}, "label-quantity needs a: write"),
    ("iid", {"clients": 500}, "500 clients with at least 1 samples each need 500 samples, seen 240"),
    ("iid", {"clients": None}, "iid needs a number of clients"),
    ("role", {"clients": 9}, "3 of 3 role ids have 1 samples or more, seen clients=9"),
    ("iid", {"test": 1.0}, r"the test share must be in \[0, 1\), seen 1.0"),
    ("iid", {"validation": -0.1}, r"the validation share must be in \[0, 1\), seen -0.1"),
    ("iid", {"held_out": 4}, "4 of 4 clients cannot be held out: leave at least one"),
    ("iid", {"held_out": -1}, "-1 of 4 clients cannot be held out"),
    ("iid", {"held_out": 1.5}, r"the held-out share must be in \[0, 1\), seen 1.5"),
    ("iid", {"probe": 1.5}, r"the probe share must be in \[0, 1\), seen 1.5"),
    ("iid", {"probe": 240}, r"probe is 240, but there are 240 training samples in all"),
    ("iid", {"probe": 0.001}, "probe is 0.001 of 240 samples, which is none: raise it"),
    ({"lists": [[0, 1], [2]]}, {"clients": None, "probe": 5}, "probe is 5, but lists say who holds what"),
    ("iid", {"seed": -1}, "the seed must be 0 or more, seen -1"),
    ({"styles": ["rotaton"]}, {}, "no style is called 'rotaton': did you mean 'rotation'"),
    ({"styles": ["stroke"]}, {}, "styles stroke tell 3 clients apart, seen 4: add rotation or noise"),
    ("lists", {}, "lists needs index lists: write {lists: PATH}"),
    ({"lists": [[0, 1], [1, 2]]}, {"clients": None}, "overlap: sample 1 is listed by clients 0 and 1"),
    ({"lists": [[0, 1], [2, 2]]}, {"clients": None}, "overlap: sample 2 is listed by clients 1 and 1"),
    ({"lists": [[0, 1], [240]]}, {"clients": None}, "client 1 lists sample 240, but samples are numbered 0 to 239"),
    ({"lists": [[0, 1], [-1]]}, {"clients": None}, "client 1 lists sample -1"),
    ({"lists": [[0, 1], []]}, {"clients": None}, "the list of client 1 is empty"),
    ({"lists": []}, {"clients": None}, "one list of sample numbers per client, seen"),
    ({"lists": [[0.5]]}, {"clients": None}, "client 0 must have a list of whole numbers"),
    ({"lists": [[0, 1], [2]]}, {}, "there are 2 index lists but clients is 4"),
    ({"lists": {"test": [[1]]}}, {"clients": None}, "give train, and test"),
    ({"lists": {"train": [[0], [1]], "test": [[2]]}}, {"clients": None}, "2 clients for train but 1 for test"),
    ({"lists": "nowhere.json"}, {"clients": None}, "there are no index lists at nowhere.json"),
]


@pytest.mark.parametrize(("split", "more", "sentence"), BAD)
def test_partitions_that_cannot_be_meant(split, more, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        partition_dataset(toy(role=torch.arange(240) % 3), split, **{"clients": 4, "seed": 0, **more})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lists.json", "lists.npz"])
def test_a_file_that_holds_no_lists(tmp_path, name):
    (tmp_path / name).write_text("[[0, 1], [2")
    with pytest.raises(ConfigError, match="does not hold index lists"):
        partition_dataset(toy(), {"lists": tmp_path / name}, None, seed=0)


def test_styles_need_images():
    data = Dataset("table", torch.zeros(40, 3), torch.arange(40) % 2, 2)
    with pytest.raises(ConfigError, match=r"styles need images, but table has samples of shape \(3,\)"):
        partition_dataset(data, "styles", 4, seed=0)
