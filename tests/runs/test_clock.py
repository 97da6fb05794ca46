"""The virtual clock: hand-made examples, and whole runs worked out again from their ledgers."""

import csv
import math

import numpy as np
import pytest
import torch

import sparing
from sparing.core.context import context
from sparing.core.errors import ConfigError
from sparing.core.method import Codec, Local, Phase, Wrap
from sparing.engines.engine import Job, total_bytes
from sparing.engines.reference import Reference
from sparing.engines.vector import Vector
from sparing.fleet.fleet import Fleet
from sparing.fleet.timing import samples_visited, seconds_for, seconds_until_upload, upload_bytes_in_time
from sparing.runs.cost import run_cost_trial
from sparing.runs.results import ROUND_COLUMNS, Record, Target, bytes_to_target, rounds_to_target, seconds_to_target
from sparing.runs.start import new_run, settle_study, task_from_study
from sparing.runs.study import study_from
from sparing.train.batches import batch_table
from support import changed, make_ctx

TASK = {"clients": 10, "model": "mlp"}
LINKS = {"up": 0.5, "down": 4, "speed": 300, "spread": 0.6}
TIGHT = {"links": LINKS, "latency": 0.05, "deadline": 1.0, "dropout": 0.1}
OPTIONS = {"rounds": 4, "sample": 6, "local": {"epochs": 2, "batch": 16}, "seed": 1}
CAPACITY = {
    "up": torch.tensor([1.0, 2.0, 0.1], dtype=torch.float64),
    "down": torch.tensor([8.0, 16.0, 1.0], dtype=torch.float64),
    "speed": torch.tensor([100.0, 50.0, 10.0], dtype=torch.float64),
}
TWICE = Local((Phase(epochs=2),))
N, DOWN = torch.tensor([50, 100, 200]), torch.tensor([1_000_000, 1_000_000, 250_000])


class Stop(Exception):
    pass


def stop(record):
    if record.round == 2:
        raise Stop


def play(method="fedavg", **options):
    return sparing.run(TASK, method, **{**OPTIONS, **options})


def said(result):
    return [r.metrics for r in result.table]


def timed(fleet, k=slice(None)):
    ctx = changed(make_ctx([0, 1, 2], n=N.tolist()), capacity=CAPACITY)
    return fleet.timed(TWICE, ctx.at(k), DOWN[k])


def test_an_example_by_hand():
    began = seconds_until_upload(0.5, TWICE, CAPACITY, N, DOWN)
    # half a second there, 1 MB over 8 Mbit/s is a second, 2 * 50 samples at 100 a second another, half a second back
    assert began.tolist() == [3.0, 0.5 + 0.5 + 4 + 0.5, 0.5 + 2 + 40 + 0.5]
    up = torch.tensor([250_000, 125_000, 12_500])
    assert (began + seconds_for("up", CAPACITY, up)).tolist() == [5.0, 6.0, 44.0]
    assert upload_bytes_in_time(5.0, CAPACITY, began).tolist() == [250_000, 0, 0]
    assert upload_bytes_in_time(3.00001, CAPACITY, began).tolist() == [1, 0, 0], "of 1.25 bytes, one is whole"
    assert upload_bytes_in_time(43.5, CAPACITY, began).tolist() == [40.5 * 125_000, 38 * 250_000, 0.5 * 12_500]


def test_a_rate_that_nobody_declares_costs_no_time():
    only_up = {"up": CAPACITY["up"]}
    assert seconds_until_upload(0.25, TWICE, only_up, N, DOWN).tolist() == [0.5] * 3
    assert seconds_for("down", only_up, DOWN).tolist() == [0.0] * 3


def test_a_deadline_that_is_just_met_is_met():
    fleet = Fleet(latency=0.5, deadline=5.0)
    ctx = timed(fleet)
    assert ctx.budget is not None
    assert ctx.budget.tolist() == [250_000, 0, 0]
    assert fleet.gone(ctx, torch.tensor([250_000, 1, 1])).tolist() == [False, True, True]
    assert fleet.gone(ctx, torch.tensor([250_001])).tolist() == [True] * 3
    assert timed(Fleet(latency=0.5)).budget is None
    assert not Fleet().gone(timed(Fleet()), torch.tensor([10**12])).any()


def test_rows_do_not_depend_on_company():
    fleet = Fleet(latency=1 / 3, deadline=43.2)
    together = timed(fleet).budget
    alone = [timed(fleet, slice(k, k + 1)).budget for k in range(3)]
    assert together is not None
    assert torch.equal(together, torch.cat([x for x in alone if x is not None]))
    ctx = timed(fleet)
    assert torch.equal(ctx.at(torch.tensor([2, 0])).budget, together[[2, 0]])
    assert ctx.common.budget is None


def test_more_is_never_faster():
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 10**7, (200,), generator=g).sort().values
    rates = {name: torch.full((200,), value, dtype=torch.float64) for name, value in (("up", 1.3), ("down", 7.7))}
    n = torch.full((200,), 30)
    assert (seconds_for("up", rates, sizes).diff() >= 0).all()
    began = seconds_until_upload(0.1, TWICE, rates, n, sizes)
    assert (began.diff() >= 0).all()
    assert (upload_bytes_in_time(9.0, rates, began).diff() <= 0).all()
    assert (upload_bytes_in_time(9.0, rates, began) >= 0).all()


@pytest.mark.parametrize("phase", [Phase(epochs=3, batch=4), Phase(steps=7, batch=4), Phase(steps=3, batch=8)])
def test_visits_are_the_samples_that_batches_hold(phase):
    for n in (1, 3, 4, 8, 9, 21):
        table = batch_table(torch.arange(9), phase, n)
        assert int(samples_visited(Local((phase,)), torch.tensor([n]))) == int((table >= 0).sum())
    both = Local((phase,), wraps=(Wrap(lambda train, phases: train, (phase, phase)),))
    assert int(samples_visited(both, torch.tensor([9]))) == 3 * int(samples_visited(Local((phase,)), torch.tensor([9])))


def rounds_again(folder, rates, n, epochs, fleet, whole_up):
    """Every round's seconds and stragglers, from the ledger and the formula; FedAvg's uploads all have one size."""
    rows = list(csv.DictReader((folder / "ledger.csv").read_text().splitlines()))
    kinds = ("value", "index", "scale", "header", "notes")
    clock, out = 0.0, []
    for t in sorted({int(row["round"]) for row in rows}):
        mine = [row for row in rows if int(row["round"]) == t]
        size = {(int(r["client"]), r["direction"]): sum(int(r[kind]) for kind in kinds) for r in mine}
        took, late, lost = [], 0, 0
        for k in {client for client, _ in size}:
            down = size[k, "down"] * 8 / (rates["down"][k] * 1e6)
            seconds = 2 * fleet["latency"] + down + epochs * n[k] / rates["speed"][k]
            seconds += whole_up * 8 / (rates["up"][k] * 1e6)
            if size[k, "up"]:
                assert size[k, "up"] == whole_up
                assert seconds <= fleet["deadline"] * (1 + 1e-12)
                took.append(seconds)
            else:
                lost += 1
                late += seconds > fleet["deadline"]
        clock += fleet["deadline"] if lost else max(took)
        out.append((clock, late, lost, took))
    return out


def test_a_run_worked_out_again_from_its_ledger(tmp_path):
    fleet = {**TIGHT, "deadline": 2.5, "dropout": 0.0}
    result = play(fleet=fleet, out=tmp_path / "a", rounds=6)
    study = study_from({"task": TASK, "fleet": fleet, **OPTIONS})
    job, _ = settle_study(study, task_from_study(study))
    rates = {name: x.numpy() for name, x in job.fleet.capacity.items()}
    largest = max(r.up_bytes // r.clients for r in result.table if r.clients)
    again = rounds_again(tmp_path / "a", rates, job.task.train.count.numpy(), 2, fleet, largest)
    for record, (clock, late, lost, took) in zip(result.table, again, strict=True):
        assert record.metrics["clock"] == pytest.approx(clock, rel=1e-12)
        assert record.metrics["late"] == late == lost, "whoever did not arrive would have been too slow"
        assert record.clients == len(took)
        for name, share in (("clock_p50", 50), ("clock_p90", 90), ("clock_max", 100)):
            assert record.metrics[name] == pytest.approx(np.percentile(took, share), rel=1e-12)
    assert {0.0} < {r.metrics["late"] for r in result.table}, "rounds with stragglers and rounds without"


@pytest.mark.parametrize("method", ["fedavg", "psfed+topk+int8+memory", "personal+randk+memory", "heterofl"])
def test_both_engines_and_any_chunk_keep_the_same_time(method):
    fleet = {**TIGHT, "deadline": 0.6} if method != "fedavg" else TIGHT
    plain = play(method, fleet=fleet, engine="debug", plan={"path": "loop"})
    for chunk in (1, 4):
        fast = play(method, fleet=fleet, plan={"path": "loop", "chunk": chunk})
        assert fast.model_sha256 == plain.model_sha256
        assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
        times = [{k: v for k, v in metrics.items() if k.startswith("clock") or k == "late"} for metrics in said(fast)]
        assert [{k: metrics[k] for k in one} for one, metrics in zip(times, said(plain), strict=True)] == times
    assert 0 < sum(metrics["late"] for metrics in said(plain)) < 24, "else nothing is shown"


def test_a_broken_run_resumes_to_the_same_second(tmp_path):
    whole = play("topk+memory", fleet=TIGHT, out=tmp_path / "whole")
    with pytest.raises(Stop):
        play("topk+memory", fleet=TIGHT, out=tmp_path / "broken", loggers=[stop])
    resumed = sparing.resume(tmp_path / "broken")
    assert said(resumed) == said(whole)
    assert resumed.model_sha256 == whole.model_sha256
    assert (tmp_path / "broken/metrics.csv").read_text() == (tmp_path / "whole/metrics.csv").read_text()


def test_a_deadline_that_nobody_meets():
    result = play(fleet={**TIGHT, "dropout": 0.0, "deadline": 0.1}, rounds=2)
    still = play(fleet={"dropout": 0.999999}, rounds=2)
    assert result.up_bytes == 0
    assert result.down_bytes == still.down_bytes, "downloads are paid for all the same"
    assert result.model_sha256 == still.model_sha256
    assert said(result) == [{"clock": 0.1, "late": 6.0}, {"clock": 0.2, "late": 6.0}]


def test_who_vanishes_is_waited_for_but_not_late():
    fleet = {**TIGHT, "deadline": 1000.0, "dropout": 0.4}
    result = play(fleet=fleet)
    assert all(metrics["late"] == 0 for metrics in said(result))
    waits = [b - a for a, b in zip([0, *result.metric("clock")], result.metric("clock"), strict=False)]
    assert [wait == 1000 for wait in waits] == [r.clients < 6 for r in result.table]
    assert any(r.clients < 6 for r in result.table)
    slowest = play(fleet={**fleet, "deadline": None})
    assert slowest.metric("clock") == pytest.approx(np.cumsum(slowest.metric("clock_max")).tolist())


def test_nobody_within_reach_takes_no_time(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("client,from,to\n0,1,1\n0,3,3\n")
    result = play(fleet={**TIGHT, "deadline": 50.0, "dropout": 0.0, "trace": str(path)}, rounds=3)
    first, second, third = result.metric("clock")
    assert 0 < first == second < third


def recording(job: Job, seen: dict[int, float]) -> Job:
    """The same job, with an uplink that writes down how much each client thinks it may send."""

    def encode(parcel, state, view):
        seen.update(zip(view.ctx.ids.tolist(), view.ctx.budget.tolist(), strict=True))
        return parcel, state

    return job._replace(method=job.method._replace(up=(Codec(encode),)))


@pytest.mark.parametrize("engine", [Vector, Reference])
def test_clients_know_how_much_they_may_send(engine):
    study = study_from({"task": TASK, "fleet": TIGHT, **OPTIONS, "plan": {"path": "loop", "chunk": 4}})
    job, study = settle_study(study, task_from_study(study))
    seen: dict[int, float] = {}
    job = recording(job, seen)
    run = new_run(study, job, None)
    ids = torch.arange(10)
    _, outcome = engine(job, run.bank).round(run.server, ids, 1)
    count, rates = job.task.train.count, job.fleet.capacity
    for k in range(10):
        before = 2 * 0.05 + int(total_bytes(outcome.down)[k]) * 8e-6 / float(rates["down"][k])
        left = 1.0 - before - 2 * int(count[k]) / float(rates["speed"][k])
        assert abs(seen[k] - max(left, 0) * float(rates["up"][k]) * 125_000) <= 1
    ctx = context(1, 1, 4, ids, ids, 10, 0)
    ups = total_bytes(outcome.up)
    sent = int(ups.max())
    expected = [not gone and sent <= seen[k] for k, gone in enumerate(job.fleet.vanished(ctx).tolist())]
    assert outcome.arrived.tolist() == expected
    assert 0 < sum(expected) < 10


@pytest.mark.parametrize("engine", ["vector", "debug"])
def test_slow_clients_send_less_instead_of_missing_the_round(engine):
    options = {"fleet": {"links": {"up": 0.02}, "deadline": 1.0}, "engine": engine, "rounds": 1, "sample": 2}
    result = play("budget", **options)
    assert result.metric("late") == [0.0]
    assert 2000 < result.up_bytes / 2 <= 2500, "what 20 kbit/s carry in a second"
    assert play("fedavg", **options).metric("late") == [2.0]


def record(t, accuracy, clock=None):
    values = dict.fromkeys(ROUND_COLUMNS, math.nan) | {
        "round": t,
        "accuracy": accuracy,
        "up_bytes": 10,
        "down_bytes": t,
    }
    return Record(**values, metrics={} if clock is None else {"clock": clock})


def test_what_it_takes_to_get_there():
    table = [record(1, 0.2, 5.0), record(2, math.nan, 7.0), record(3, 0.5, 9.5), record(4, 0.4, 12.0)]
    assert (
        rounds_to_target(table, Target(0.2)),
        bytes_to_target(table, Target(0.2)),
        seconds_to_target(table, Target(0.2)),
    ) == (
        1,
        11,
        5.0,
    )
    assert (
        rounds_to_target(table, Target(0.3)),
        bytes_to_target(table, Target(0.3)),
        seconds_to_target(table, Target(0.3)),
    ) == (
        3,
        36,
        9.5,
    )
    assert all(math.isnan(f(table, Target(0.6))) for f in (rounds_to_target, bytes_to_target, seconds_to_target))
    assert math.isnan(seconds_to_target([record(1, 0.9)], Target(0.5))), "no clock, no time"
    assert rounds_to_target([record(1, 0.9)], Target(0.5)) == 1


def test_results_say_it_too():
    result = play(fleet={"links": LINKS}, rounds=3)
    goal = result.table[1].accuracy
    t = next(r.round for r in result.table if r.accuracy >= goal)
    assert result.rounds_to(goal) == t
    assert result.time_to(goal) == result.metric("clock")[t - 1]
    assert result.bytes_to(goal) == sum(r.up_bytes + r.down_bytes for r in result.table[:t])
    plain = play(rounds=1)
    assert math.isnan(plain.time_to(0.0))
    assert "clock" not in plain.table[0].metrics
    assert plain.model_sha256 == play(rounds=1, fleet={"links": LINKS}).model_sha256, "a clock changes nothing"


@pytest.mark.parametrize("deadline", [None, 1.0])
def test_check_foretells_the_first_round(deadline):
    fleet = {**TIGHT, "deadline": deadline, "dropout": 0.0}
    study = study_from({"task": TASK, "fleet": fleet, **OPTIONS})
    assert run_cost_trial(study).clock == pytest.approx(play(fleet=fleet, rounds=1).metric("clock")[0])
    assert run_cost_trial(study_from({"task": TASK, **OPTIONS})).clock is None


@pytest.mark.parametrize(
    ("fleet", "words"),
    [
        (
            {"deadline": 5},
            "fleet.deadline is 5 seconds, but no client declares how fast it uploads; set fleet",
        ),
        ({"deadline": 5, "links": {"down": 5, "speed": 9}}, "no client declares how fast it uploads"),
        ({"deadline": 0, "links": "4g"}, r"fleet.deadline: .*greater than 0 \(seen: 0\)"),
        ({"deadline": -3, "links": "4g"}, r"fleet.deadline: .*greater than 0"),
        ({"latency": -1}, r"fleet.latency: .*greater than or equal to 0"),
        ({"links": {"up": 0}}, r"fleet.links.up: .*greater than 0"),
        ({"links": {"down": -2}}, r"fleet.links.down: .*greater than 0"),
        ({"links": {"speed": float("inf")}}, r"fleet.links.speed: .*finite"),
        ({"links": {"upp": 1}}, r"unknown key 'fleet.links.upp'; did you mean 'up'"),
        ({"links": "5g"}, r"fleet.links.kind: .*'3g', '4g'"),
        (
            {"links": {"kind": "4g", "up": 3}},
            "fleet.links has kind '4g' and rates of its own; give kind, or up",
        ),
        ({"links": {"spread": 0.5}}, "fleet.links.spread is 0.5, but there is no rate to spread"),
        ({"links": 7}, r"fleet.links is 7; it has keys of its own"),
    ],
)
def test_mistakes_are_named(fleet, words):
    with pytest.raises(ConfigError, match=words) as caught:
        play(fleet=fleet, rounds=1)
    assert "\n" not in str(caught.value)
