"""The evaluation contract: who, on what, and that looking changes nothing."""

import csv
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn

import sparing
from sparing.runs.study import study_from
from sparing.train.metrics import jain, micro_auc, micro_aucs, weighted_mean, worst_decile

QUICK = {"rounds": 3, "sample": 4, "local": {"steps": 3, "batch": 16}, "seed": 2}
TASK = {"data": "digits", "clients": 8, "held_out": 2}


def play(method, **options):
    who = {"who": ["global", "before", "after"]}
    return sparing.run(TASK, method, **{**QUICK, "evaluate": who, **options})


@pytest.mark.parametrize("method", ["fedavg", "psfed+topk+memory", "personal", "local"])
def test_who_is_evaluated_does_not_change_training(method):
    with_all = play(method)
    with_none = play(method, evaluate={"every": 3, "who": ["global"]})
    assert with_all.model_sha256 == with_none.model_sha256


def test_personalized_is_another_word_for_before():
    said = [study_from({"evaluate": {"who": ["global", word]}}) for word in ("personalized", "before")]
    assert said[0].fingerprint() == said[1].fingerprint()
    assert said[0].evaluate.who == ["global", "before"]


def test_every_client_every_round_is_on_record(tmp_path):
    result = play("personal", out=tmp_path / "a")
    rows = list(csv.DictReader((tmp_path / "a/clients.csv").read_text().splitlines()))
    assert {row["who"] for row in rows} == {"global", "before", "after", "new"}
    trained = {int(row["client"]) for row in rows if row["who"] == "before"}
    new = {int(row["client"]) for row in rows if row["who"] == "new"}
    assert len(trained) == 6
    assert len(new) == 2
    assert not trained & new
    last = [row for row in rows if row["round"] == "3"]
    accuracy = {who: [float(r["accuracy"]) for r in last if r["who"] == who] for who in ("global", "before", "after")}
    samples = [int(r["samples"]) for r in last if r["who"] == "before"]
    end = result.table[-1]
    assert end.personal_accuracy == pytest.approx(np.mean(accuracy["before"]))
    assert end.personal_weighted == pytest.approx(np.average(accuracy["before"], weights=samples))
    assert end.after_accuracy == pytest.approx(np.mean(accuracy["after"]))
    assert end.variance == pytest.approx(np.var(accuracy["before"]))
    assert end.benefit == pytest.approx(np.mean(accuracy["before"]) - np.mean(accuracy["global"]))
    assert end.new_accuracy == pytest.approx(np.mean([float(r["accuracy"]) for r in last if r["who"] == "new"]))


def test_held_out_clients_never_train():
    result = sparing.run({**TASK, "held_out": 0.5}, rounds=6, sample=1.0, local={"epochs": 1})
    assert all(record.clients == 4 for record in result.table)
    assert not math.isnan(result.table[-1].new_accuracy)


def test_under_fedavg_everybody_starts_from_the_global_model():
    end = play("fedavg").table[-1]
    assert end.benefit == 0
    assert end.after_accuracy != end.personal_accuracy


def test_a_client_that_took_part_is_told_apart_from_one_that_never_did():
    table = sparing.run({"data": "digits", "clients": 10}, "personal", rounds=12, sample=2, local={"epochs": 3}).table
    assert math.isnan(table[-1].unmet_accuracy) or table[-1].unmet_accuracy < table[-1].met_accuracy
    assert not math.isnan(table[0].unmet_accuracy)


def test_choosing_on_the_validation_set_leaves_the_test_set_alone():
    task = {"data": "digits", "clients": 5, "validation": 0.2}
    on_test, on_validation = (
        sparing.run(task, rounds=2, local={"epochs": 1}, evaluate={"set": name}) for name in ("test", "validation")
    )
    assert on_test.model_sha256 == on_validation.model_sha256
    assert on_test.loss != on_validation.loss
    with pytest.raises(sparing.SparingError, match=r"task.validation is 0"):
        sparing.run("digits", rounds=1, evaluate={"set": "validation"})


def test_metrics_against_their_definitions():
    rng = np.random.default_rng(0)
    scores, y = rng.random((40, 5)).round(1), rng.integers(0, 5, 40)
    want = roc_auc_score(np.eye(5)[y].ravel(), scores.ravel())
    assert micro_auc(torch.tensor(scores), torch.tensor(y)) == pytest.approx(want)
    a = torch.tensor(rng.random(30))
    assert jain(a) == pytest.approx(float(a.sum() ** 2 / (30 * (a**2).sum())))
    assert worst_decile(a) == pytest.approx(float(a.sort().values[:3].mean()))
    assert math.isnan(weighted_mean(a[:0]))


def test_areas_of_many_clients_are_those_of_each():
    g = torch.Generator().manual_seed(0)
    count = torch.tensor([3, 0, 50, 1, 20])
    owner = torch.arange(5).repeat_interleave(count)
    scores, y = (torch.rand(74, 4, generator=g) * 5).round(), torch.randint(4, (74,), generator=g)
    found = micro_aucs(scores, y, owner, 5).tolist()
    parts = zip(scores.split(count.tolist()), y.split(count.tolist()), strict=True)
    assert found == pytest.approx([micro_auc(some, labels) for some, labels in parts], abs=0, nan_ok=True)
    assert math.isnan(found[1])


def test_regression_has_a_loss_but_no_accuracy():
    x = torch.randn(40, 3)
    task = sparing.Task(lambda: nn.Linear(3, 1), [(x[:20], x[:20, 0]), (x[20:], x[20:, 0])], test=(x, x[:, 0]))
    result = sparing.run(task, rounds=5, sample=1.0, local={"lr": 0.1})
    assert result.loss < 0.2
    assert math.isnan(result.accuracy)
    assert result.summary["accuracy"] is None
