"""The law: with the same clients counted, a model has the same bits with masks and without, on both engines."""

import math
from collections import Counter

import pytest

import sparing
from secure_round.studies import CNN, COMMON, SHARED, STUDY, TASK, method_name, normed_task, play

COMBINATIONS = [
    "psfed",
    [{"psfed": {"selector": "gradient"}}],
    [{"psfed": {"sync": 2, "fraction": 0.3}}, "fedavgm"],
    ["personal", "fedadam"],
    "scaffold",
    [SHARED, "memory"],
    [{"randk": {"shared": True, "unbiased": True}}, "personal"],
    [COMMON, "memory"],
    [{"int8": {"common": True, "stochastic": True}}, "memory", "fedavgm"],
    ["psfed", COMMON, "memory"],
    [COMMON, "memory", "broadcast"],
    ["fedrep", COMMON],
    ["ditto", COMMON, "memory"],
]
STEIN = {"stein": {"warmup": 1}}
ROUNDED = ["fedsim", "pfedsim", [STEIN], [STEIN, COMMON, "memory"]]
ROUNDED += [[{"stein": {"warmup": 1, "estimator": "literal"}}], ["personal", STEIN, "fedavgm"]]


def same_rounds(one: sparing.Result, other: sparing.Result, rel: float = 0.0, lost: bool = False) -> None:
    """But for their bytes; training losses are added up otherwise, and in the open those of lost clients count too."""
    for a, b in zip(one.table, other.table, strict=True):
        assert a.clients == b.clients
        for name in ("accuracy", "personal_accuracy", "coverage", "loss"):
            assert getattr(a, name, None) == pytest.approx(getattr(b, name, None), rel=rel, abs=0, nan_ok=True)
        if not lost:
            assert a.train_loss == pytest.approx(b.train_loss, rel=1e-6, nan_ok=True)


def same_engines(runs) -> None:
    assert runs.debug.model_sha256 == runs.vector.model_sha256
    assert runs.ledger("debug") == runs.ledger("vector")
    for a, b in zip(runs.debug.table, runs.vector.table, strict=True):
        assert (a.train_loss, a.clients, a.up_bytes, a.down_bytes) == pytest.approx(
            (b.train_loss, b.clients, b.up_bytes, b.down_bytes), rel=0, abs=0, nan_ok=True
        )
        assert a.metrics == pytest.approx(b.metrics, rel=1e-12, nan_ok=True)


@pytest.mark.parametrize("method", COMBINATIONS, ids=method_name)
def test_masks_change_no_bit(method, tmp_path):
    runs = play(method, tmp_path)
    assert runs.open.model_sha256 == runs.debug.model_sha256
    same_engines(runs)
    same_rounds(runs.open, runs.debug)
    assert [r.metrics for r in runs.open.table] == [pytest.approx(r.metrics, nan_ok=True) for r in runs.debug.table]


@pytest.mark.parametrize("method", ["fedavg", ["psfed", SHARED, COMMON, "memory"]], ids=method_name)
def test_masks_change_no_bit_of_running_means_and_counts(method, tmp_path):
    runs = play(method, tmp_path, normed_task())
    assert runs.open.model_sha256 == runs.debug.model_sha256
    assert int(runs.debug.model["1.num_batches_tracked"]) > 0
    same_engines(runs)


@pytest.mark.parametrize("method", [["personal", COMMON, "memory"], [SHARED, "memory", "broadcast"]], ids=method_name)
def test_masks_change_no_bit_where_clients_are_lost(method, tmp_path):
    fleet = {"dropout": 0.15, "available": 0.9}
    task = TASK | {"clients": 12}
    runs = play(method, tmp_path, task, sample=9, rounds=4, evaluate={"every": 4}, fleet=fleet)
    assert min(r.clients for r in runs.open.table) < 9
    counted = Counter(
        int(row["round"]) for row in runs.ledger("debug") if (row["direction"], row["counted"]) == ("up", "1")
    )
    assert [counted[r.round] for r in runs.debug.table] == [r.clients for r in runs.debug.table]
    assert runs.open.model_sha256 == runs.debug.model_sha256
    same_engines(runs)
    same_rounds(runs.open, runs.debug, lost=True)


@pytest.mark.parametrize("method", ROUNDED, ids=method_name)
def test_what_looks_at_sums_of_numbers_is_rounded_once_more(method, tmp_path):
    runs = play(method, tmp_path)
    same_engines(runs)
    same_rounds(runs.open, runs.debug, rel=1e-9)
    for name, x in runs.open.model.items():
        assert (x - runs.debug.model[name]).abs().max() <= 1e-6 * x.abs().max(), name


def test_stein_leaves_layers_alone_of_which_parts_are_known(tmp_path):
    """Sums over a layer say nothing of the part where its target is defined."""
    runs = play(["psfed", STEIN], tmp_path)
    same_engines(runs)
    same_rounds(runs.open, runs.debug, rel=1e-3)


@pytest.mark.accel
@pytest.mark.parametrize("path", ["implicit", "stacked", "loop-fast"])
@pytest.mark.parametrize("method", ["fedavg", [COMMON, "memory"]], ids=method_name)
def test_fast_ways_to_train_have_their_own_bits_with_masks_too(path, method):
    study = STUDY | {"local": {"steps": 1}, "plan": {"path": path}}
    on, off = (sparing.run(TASK, method, secure=secure, **study) for secure in (True, False))
    assert on.model_sha256 == off.model_sha256


def test_convolutions_too(tmp_path):
    runs = play(["psfed", "personal", COMMON, "memory"], tmp_path, CNN, rounds=2)
    assert runs.open.model_sha256 == runs.debug.model_sha256
    same_engines(runs)


@pytest.mark.filterwarnings("ignore:round .* counts for nobody")
def test_a_round_with_too_few_counts_for_nobody(tmp_path):
    """The model stays, memories take back what was not added, and what was sent is paid for."""
    runs = play([SHARED, "memory"], tmp_path, rounds=5, evaluate={"every": 5}, fleet={"dropout": 0.4})
    same_engines(runs)
    failed = [i for i, record in enumerate(runs.debug.table) if not record.clients]
    assert 0 < len(failed) < 5
    for i in failed:
        assert runs.open.table[i].clients < 5  # two thirds of the others, and one
        assert math.isnan(runs.debug.table[i].train_loss)
        assert runs.debug.table[i].up_bytes > 0
    ledger = [row for row in runs.ledger("debug") if int(row["round"]) == failed[0] + 1 and row["direction"] == "up"]
    assert {(row["unmask"], row["counted"]) for row in ledger} == {("0", "0")}
    assert all(int(row["shares"]) for row in ledger)


@pytest.mark.filterwarnings("ignore:round .* counts for nobody")
def test_where_no_round_counts_the_model_stays(tmp_path):
    runs = play(["fedavgm", COMMON, "memory"], tmp_path, fleet={"dropout": 0.99})
    same_engines(runs)
    assert {record.clients for record in runs.debug.table} == {0}
    start = sparing.run(TASK, "fedavg", **STUDY | {"local": {"steps": 1, "lr": 1e-30}})
    assert all((x == start.model[name]).all() for name, x in runs.debug.model.items())


def test_the_round_that_counts_for_nobody_says_why():
    with pytest.warns(UserWarning, match=r"round 1 counts for nobody: \d of 6 clients arrive, where 4 are needed"):
        sparing.run(TASK, secure=True, **STUDY | {"rounds": 1, "fleet": {"dropout": 0.9}})


@pytest.mark.filterwarnings("ignore:round .* asks nobody")
def test_where_too_few_can_be_reached_nobody_is_asked(tmp_path):
    fleet, method = {"available": 0.5}, [COMMON, "memory"]
    runs = play(method, tmp_path, rounds=5, evaluate={"every": 5}, fleet=fleet)
    same_engines(runs)
    counted = [record.clients for record in runs.debug.table]
    assert 0 in counted
    assert max(counted) > 2
    skipped = counted.index(0) + 1
    assert not [row for row in runs.ledger("debug") if int(row["round"]) == skipped]


def test_a_sum_of_many_over_a_sparse_graph(tmp_path):
    task = {"data": "digits", "clients": 52, "model": {"mlp": {"hidden": []}}}
    study = {"rounds": 1, "sample": 51, "evaluate": {"every": 1, "clients": 1}, "local": {"steps": 1}}
    runs = play([COMMON], tmp_path, task, fleet={"dropout": 0.1}, secure={"degree": 20}, **study)
    assert runs.open.model_sha256 == runs.debug.model_sha256
    assert 0 < runs.debug.table[0].clients < 51
    same_engines(runs)


def test_a_run_goes_on_where_it_stopped(tmp_path):
    from support import Stop, stop_after

    study = STUDY | {"rounds": 3, "secure": True, "engine": "debug"}
    whole = sparing.run(TASK, [COMMON, "memory"], **study)
    with pytest.raises(Stop):
        sparing.run(TASK, [COMMON, "memory"], out=tmp_path / "run", loggers=[stop_after(1)], **study)
    assert sparing.resume(tmp_path / "run").model_sha256 == whole.model_sha256


@pytest.mark.filterwarnings("ignore:round .* counts for nobody")
def test_a_seed_says_who_is_in_the_sums_of_a_sparse_graph():
    """Rounds in which some graphs would leave somebody with too few neighbours, and others not."""
    task = {"data": "digits", "clients": 52, "model": {"mlp": {"hidden": []}}}
    study = {"rounds": 4, "sample": 51, "evaluate": {"every": 4, "clients": 1}, "local": {"steps": 1}}
    runs = [sparing.run(task, secure={"degree": 20}, fleet={"dropout": 0.17}, **study) for _ in range(3)]
    counted = [[record.clients for record in run.table] for run in runs]
    assert counted[0] == counted[1] == counted[2]
    assert len({run.model_sha256 for run in runs}) == 1
