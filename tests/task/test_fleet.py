import math

import pytest
import torch

import sparing
from sparing.core.errors import DataError
from sparing.task.fleet import Fleet, read_capacity, read_trace
from support import make_ctx

LOCAL = {"epochs": 1, "batch": 32}


def test_cohorts_are_drawn_without_replacement_and_differ_between_rounds():
    drawn = [Fleet().cohort(0, t, 50, 10).tolist() for t in range(20)]
    assert all(len(set(ids)) == 10 and ids == sorted(ids) for ids in drawn)
    assert len({tuple(ids) for ids in drawn}) == 20
    assert Fleet().cohort(0, 1, 50, 50).tolist() == list(range(50))


def test_every_client_is_drawn_equally_often():
    hits = torch.zeros(20)
    for t in range(2000):
        hits[Fleet().cohort(0, t, 20, 5)] += 1
    assert (hits / 2000 - 0.25).abs().max() < 5 * math.sqrt(0.25 * 0.75 / 2000)


def test_only_those_within_reach_are_drawn():
    fleet = Fleet(available=0.3)
    for t in range(1, 30):
        present = fleet.present(0, t, 100)
        assert present[fleet.cohort(0, t, 100, 10)].all()
        assert len(fleet.cohort(0, t, 100, 100)) == int(present.sum())
    share = torch.stack([fleet.present(0, t, 100) for t in range(100)]).float().mean()
    assert abs(float(share) - 0.3) < 5 * math.sqrt(0.21 / 10_000)


def test_vanishing_is_keyed_by_client_and_round():
    fleet, ctx = Fleet(dropout=0.5), make_ctx(list(range(30)))
    gone = fleet.vanished(ctx)
    assert torch.equal(gone[3:4], fleet.vanished(ctx.at(slice(3, 4))))
    assert 5 < int(gone.sum()) < 25
    assert not torch.equal(gone, fleet.vanished(ctx._replace(round=2)))


def test_a_trace_says_who_is_there_and_repeats(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,from,to\n0,1,2\n2,2,3\n")
    fleet = Fleet(trace=read_trace(path, 3))
    there = [fleet.present(0, t, 3).nonzero()[:, 0].tolist() for t in range(1, 7)]
    assert there == [[0], [0, 2], [2], [0], [0, 2], [2]]


def test_capacity_reaches_the_context(tmp_path):
    path = tmp_path / "capacity.csv"
    path.write_text("client,rank,up\n1,0.5,10\n0,1,20\n2,0.25,5\n")
    capacity = read_capacity(path, 3)
    assert capacity["rank"].tolist() == [1.0, 0.5, 0.25]
    ctx = make_ctx([0, 1, 2])._replace(capacity=capacity)
    assert ctx.at(torch.tensor([2, 0])).capacity["up"].tolist() == [5.0, 20.0]


@pytest.mark.parametrize(
    ("reader", "text", "words"),
    [
        (read_trace, "client,from\n0,1\n", "no column 'to'"),
        (read_trace, "client,from,to\n9,1,2\n", "names client 9; there are clients 0 to 2"),
        (read_trace, "client,from,to\n0,2,1\n", "from 2 to 1"),
        (read_trace, "client,from,to\n0,0,1\n", "rounds count from 1"),
        (read_trace, "client,from,to\n", "reaches nobody"),
        (read_trace, "client,from,to\n0,1,soon\n", "line 2 holds something that is not a number"),
        (read_trace, "client,from,to\n0,1\n", "line 2"),
        (read_capacity, "client,rank\n0,1\n2,1\n", "says nothing of client 1"),
    ],
)
def test_bad_files_are_refused(tmp_path, reader, text, words):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        reader(path, 3)


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"there is no file 'nowhere.csv'"):
        read_trace("nowhere.csv", 3)


@pytest.mark.parametrize("method", ["fedavg", "psfed+topk+int8+memory", "personal+randk+memory"])
def test_both_engines_lose_the_same_clients(method):
    fleet = {"available": 0.6, "dropout": 0.4}
    options = {"rounds": 4, "local": LOCAL, "fleet": fleet, "plan": {"path": "loop"}}
    fast, plain = (sparing.run("digits", method, engine=e, **options) for e in ("vector", "debug"))
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert [r.clients for r in fast.table] == [r.clients for r in plain.table]
    assert min(r.clients for r in fast.table) < 10
    whole = sparing.run("digits", method, **{**options, "fleet": {"available": 0.6}})
    assert fast.up_bytes < whole.up_bytes, "who vanished uploaded nothing"


def test_a_round_with_nobody_changes_nothing(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,from,to\n0,1,1\n0,3,3\n")
    result = sparing.run("digits", rounds=3, local=LOCAL, fleet={"trace": str(path)}, out=tmp_path / "run")
    assert [r.clients for r in result.table] == [1, 0, 1]
    assert result.table[1].accuracy == result.table[0].accuracy
    assert result.table[1].up_bytes == result.table[1].down_bytes == 0
    assert sparing.resume(tmp_path / "run").model_sha256 == result.model_sha256
