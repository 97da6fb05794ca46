import math

import pytest
import torch

import sparing
from sparing.core.context import EVERYONE
from sparing.core.errors import DataError
from sparing.core.keys import hashes
from sparing.fleet.fleet import Fleet, read_capacity, read_trace
from sparing.fleet.links import _LINK_KINDS, link_rates
from sparing.runs.start import _fleet_from_section, task_from_study
from sparing.runs.study import study_from
from support import changed, make_ctx

LOCAL = {"steps": 2, "batch": 32}


def test_cohorts_are_drawn_without_replacement_and_differ_between_rounds():
    drawn = [Fleet().cohort(0, t, 50, 10).tolist() for t in range(20)]
    assert all(len(set(ids)) == 10 and ids == sorted(ids) for ids in drawn)
    assert len({tuple(ids) for ids in drawn}) == 20
    assert Fleet().cohort(0, 1, 50, 50).tolist() == list(range(50))


def test_those_with_the_smallest_words_are_drawn():
    everyone = make_ctx([EVERYONE], t=3)
    words = hashes(everyone.keys("cohort"), 50)[0]
    assert Fleet().cohort(0, 3, 50, 10).tolist() == sorted(words.argsort()[:10].tolist())
    held = Fleet(held_out=words.argsort()[:4])
    assert held.cohort(0, 3, 50, 10).tolist() == sorted(words.argsort()[4:14].tolist())
    assert held.cohort(0, 3, 50, 50).tolist() == sorted(words.argsort()[4:].tolist())


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
    ctx = changed(make_ctx([0, 1, 2]), capacity=capacity)
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
        (read_trace, "client,from,to\n0,1,inf\n", "line 2 holds something that is not a number"),
        (read_capacity, "client,rank\n0,1\n2,1\n", "says nothing of client 1"),
        (read_capacity, "client,up\n0,1\n1,0\n2,1\n", "client 1 declares up 0; it must be above 0"),
        (read_capacity, "client,speed\n0,1\n1,1\n2,-4\n", "client 2 declares speed -4; it must be above 0"),
        (read_capacity, "client,down\n0,1\n1,inf\n2,1\n", "line 3 holds something that is not a number"),
    ],
)
def test_bad_files_are_refused(tmp_path, reader, text, words):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=words):
        reader(path, 3)


@pytest.mark.parametrize(
    ("reader", "content", "words"),
    [
        (read_trace, b"client,from,to\n0,1.5,3\n", "client 0 has from 1.5; rounds are whole numbers"),
        (read_trace, b"client,from,to\n0,1,2.5\n", "client 0 has to 2.5; rounds are whole numbers"),
        (
            read_trace,
            b"client,from,to\n0,1,1e300\n",
            r"client 0 has to 1e\+300; rounds are whole numbers, at most 9,007,",
        ),
        (read_trace, b"client,from,to\n0,1,\xe9\n", "is no CSV in UTF-8: save it as one .*0xe9"),
        (read_trace, b"client,from,to\n0,1," + b"1" * 200_000, r"is no CSV in UTF-8: .*field larger than field limit"),
        (read_trace, b"client,from,to,to\n0,1,2,3\n", "has two columns 'to'; keep one"),
        (read_trace, b"client,from,to\n0,1,2,3\n", "line 2 holds something that is not a number"),
        (
            read_capacity,
            b"client,up," + b"a" * 9999 + b"\n0,1,1\n1,1,1\n2,1,1\n",
            "has a column 'aaa.*' that nothing reads",
        ),
        (read_capacity, b"client,up\n0,1\n1,1\n2,1\n1,1\n", "names client 1 twice; keep one row"),
    ],
)
def test_bytes_that_no_table_has(tmp_path, reader, content, words):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as error:
        reader(path, 3)
    assert len(str(error.value)) < 500


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbfclient,from,to\r\n\r\n0,1,2\r\n")
    assert read_trace(path, 2).present(2, 2).tolist() == [True, False]


def test_a_long_trace_takes_no_more_than_a_short_one(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("client,from,to\n0,1,400000000\n1,3,3\n")
    fleet = Fleet(trace=read_trace(path, 2))
    assert sum(x.nbytes for x in fleet.trace) == 48
    there = [fleet.present(0, t, 2).tolist() for t in (2, 3, 400_000_000, 400_000_003)]
    assert there == [[True, False], [True, True], [True, False], [True, True]]


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"there is no file 'nowhere.csv'"):
        read_trace("nowhere.csv", 3)


def test_rates_by_figure_by_kind_and_by_file(tmp_path):
    assert link_rates(0, 3) == {}
    plain = link_rates(0, 3, up=1.0, speed=200.0)
    assert {name: x.tolist() for name, x in plain.items()} == {"up": [1.0] * 3, "speed": [200.0] * 3}
    wifi = link_rates(0, 2, kind="wifi", speed=9.0)
    assert {name: x.tolist() for name, x in wifi.items()} == {"up": [15.0] * 2, "down": [60.0] * 2, "speed": [9.0] * 2}
    path = tmp_path / "devices.csv"
    path.write_text("client,up\n0,3\n2,0.1\n1,4\n")
    study = study_from({"task": {"clients": 3}, "fleet": {"links": {"up": 1, "down": 7}, "capacity": str(path)}})
    fleet = _fleet_from_section(study.fleet, task_from_study(study), seed=0)
    assert {name: x.tolist() for name, x in fleet.capacity.items()} == {"up": [3.0, 4.0, 0.1], "down": [7.0] * 3}


def test_rates_spread_around_the_figure_keyed_by_client_and_seed():
    drawn = link_rates(3, 4000, up=2.0, down=20.0, spread=0.5)
    for name, middle in (("up", 2.0), ("down", 20.0)):
        logs = (drawn[name] / middle).log()
        assert abs(float(logs.mean())) < 5 * 0.5 / math.sqrt(4000)
        assert abs(float(logs.std()) - 0.5) < 5 * 0.5 / math.sqrt(8000)
    together = torch.stack([drawn["up"].log(), drawn["down"].log()]).corrcoef()[0, 1]
    assert abs(float(together)) < 5 / math.sqrt(4000), "up and down are drawn apart"
    assert torch.equal(link_rates(3, 10, up=2.0, spread=0.5)["up"], drawn["up"][:10]), (
        "more clients change nobody's link"
    )
    assert not torch.equal(link_rates(4, 10, up=2.0, spread=0.5)["up"], drawn["up"][:10])
    assert all(float(f"{x:.4g}") == x for x in drawn["up"].tolist())


def test_mixed_links_are_one_of_each_kind_equally_often():
    mixed = link_rates(0, 4000, kind="mixed")
    pairs = list(zip(mixed["up"].tolist(), mixed["down"].tolist(), strict=True))
    assert set(pairs) == set(_LINK_KINDS.values())
    assert all(abs(pairs.count(one) / 4000 - 0.25) < 5 * math.sqrt(0.1875 / 4000) for one in _LINK_KINDS.values())


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
