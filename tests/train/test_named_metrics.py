"""Metrics by name, of one's own and of torchmetrics; what tables rank by; one logit and many labels."""

import json
import math

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import sparing
from sparing.core.errors import CheckpointError, ConfigError
from sparing.tasks.task import Task
from sparing.train.named_metrics import METRICS, read_metrics

G = torch.Generator().manual_seed(0)
LOGITS, CLASSES = torch.randn(40, 7, generator=G), torch.randint(7, (40,), generator=G)
LABELS = torch.randint(2, (40, 7), generator=G)
VALUES, TARGETS = torch.randn(40, 2, generator=G), torch.randn(40, 2, generator=G)
YES = (LOGITS > 0).int().numpy()

KNOWN = {
    "top5": (LOGITS, CLASSES, sk.top_k_accuracy_score(CLASSES, LOGITS, k=5, labels=range(7))),
    "macro_f1": (LOGITS, CLASSES, sk.f1_score(CLASSES, LOGITS.argmax(1), average="macro")),
    "multilabel_accuracy": (LOGITS, LABELS, float(np.mean(LABELS.numpy() == YES))),
    "multilabel_f1": (LOGITS, LABELS.float(), sk.f1_score(LABELS, YES, average="macro")),
    "mse": (VALUES, TARGETS, sk.mean_squared_error(TARGETS, VALUES)),
    "mae": (VALUES[:, :1], TARGETS[:, 0], sk.mean_absolute_error(TARGETS[:, 0], VALUES[:, 0])),
    "r2": (VALUES, TARGETS, sk.r2_score(TARGETS, VALUES)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_metrics_are_those_of_scikit_learn(name):
    outputs, y, wanted = KNOWN[name]
    assert METRICS[name].of(outputs, y) == pytest.approx(wanted, rel=1e-6)


def test_one_logit_has_two_classes():
    y = (LOGITS[:, 0] + 0.5 > 0).long()
    wanted = sk.f1_score(y, LOGITS[:, 0] > 0, average="macro")
    assert METRICS["macro_f1"].of(LOGITS[:, :1], y) == pytest.approx(wanted)


def test_directions():
    assert {one.name for one in METRICS.values() if not one.higher_is_better} == {"loss", "mse", "mae", "perplexity"}
    assert [one.name for one in read_metrics(["Top-5", "macro-f1", "R2"])] == ["top5", "macro_f1", "r2"]


def halved(outputs, targets):
    return (outputs.argmax(-1) == targets).double().mean() / 2


def distance(outputs, targets):
    return float((outputs.argmax(-1) - targets).abs().double().mean())


distance.higher_is_better = False


class Torchmetric:
    """What torchmetrics promises: it adds up, so it must begin anew each time."""

    higher_is_better = True

    def reset(self):
        self.right = self.n = 0

    def update(self, outputs, targets):
        self.right += int((outputs.argmax(-1) == targets).sum())
        self.n += len(targets)

    def compute(self):
        return torch.tensor(self.right / self.n)


def parts(n, seed, y=None):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return x, x[:, :3].argmax(1) if y is None else y(x)


def task(y=None, width=3, **options):
    return Task(
        lambda: nn.Linear(6, width),
        [parts(12, i, y) for i in range(4)],
        [parts(9, 9 + i, y) for i in range(4)],
        **options,
    )


def run(task, path="loop", **study):
    return sparing.run(task, rounds=2, sample=2, seed=1, plan={"path": path}, **study)


@pytest.mark.parametrize("path", ["loop", "loop-fast", "stacked", "implicit"])
def test_metrics_beside_accuracy_change_nothing_else(path):
    plain = run(task(), path)
    other = run(task(metric=["macro_f1", "auc", halved, distance, Torchmetric()]), path)
    assert plain.model_sha256 == other.model_sha256
    assert (plain.accuracy, plain.loss, plain.personal_accuracy) == (
        other.accuracy,
        other.loss,
        other.personal_accuracy,
    )
    assert (plain.ranked_by, plain.higher_is_better, plain.score) == ("accuracy", True, plain.accuracy)
    assert plain.personal_score == plain.personal_accuracy
    assert plain.table[-1].metrics == {} == {k: v for k, v in plain.summary.items() if k in ("ranked_by", "score")}
    last = other.table[-1].metrics
    assert last["halved"] == other.accuracy / 2
    assert last["personal_halved"] == pytest.approx(other.personal_accuracy / 2)
    assert last["Torchmetric"] == pytest.approx(other.accuracy)
    assert last["personal_Torchmetric"] == pytest.approx(other.personal_accuracy)
    assert other.metric("macro_f1")[-1] == other.score == other.summary["score"]
    assert (other.ranked_by, other.summary["higher_is_better"]) == ("macro_f1", True)
    assert 0.5 < last["personal_auc"] <= 1
    lower = run(task(metric=distance), path)
    assert (lower.ranked_by, lower.higher_is_better, lower.score) == ("distance", False, last["distance"])


def test_a_study_names_metrics(tmp_path):
    result = sparing.run("digits", rounds=1, sample=4, evaluate={"metrics": ["macro_f1", "top5"]}, out=tmp_path / "a")
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    assert summary["ranked_by"] == "macro_f1"
    assert summary["score"] == result.score > 0
    assert summary["personal_score"] > 0
    rows = (tmp_path / "a/metrics.csv").read_text().splitlines()
    assert {row.split(",")[1] for row in rows[1:]} >= {"macro_f1", "top5", "personal_macro_f1", "personal_top5"}
    assert sparing.run("digits", rounds=1, sample=4, evaluate={"metrics": "auc"}).ranked_by == "auc"
    with pytest.raises(ConfigError, match="no metric is called 'macro_f2': did you mean 'macro_f1'"):
        sparing.run("digits", rounds=1, evaluate={"metrics": ["macro_f2"]})


def test_a_resumed_run_keeps_its_metrics(tmp_path):
    whole = run(task(metric="macro_f1"), out=tmp_path / "a")
    again = sparing.resume(tmp_path / "a", task(metric="macro_f1"))
    assert again.score == whole.score
    with pytest.raises(CheckpointError, match="the task's metrics changed since the run began"):
        sparing.resume(tmp_path / "a", task(metric="auc"))


def many(x):
    return (x[:, :3] > 0).float()


def one(x):
    return (x[:, 0] > 0).long()


def per_sample(output, y):
    return bce(output.reshape(len(y), -1), y.reshape(len(y), -1).float(), reduction="none").mean(1)


@pytest.mark.parametrize("path", ["loop", "stacked"])
@pytest.mark.parametrize(
    ("y", "width"), [(many, 3), (lambda x: many(x).long(), 3), (one, 1), (lambda x: one(x).float(), 1)]
)
def test_one_logit_and_many_labels_are_measured(y, width, path):
    result = run(task(y, width, loss=per_sample), path, local={"epochs": 20})
    record = result.table[-1]
    assert min(record.accuracy, record.personal_accuracy, record.auc, record.worst_decile) > 0.8
    assert result.ranked_by == "accuracy"
    x, targets = (torch.cat(both) for both in zip(*(parts(9, 9 + i, y) for i in range(4)), strict=True))
    logits = (x @ result.model["weight"].T + result.model["bias"]).reshape(targets.shape)
    assert record.accuracy == pytest.approx(float(((logits > 0) == (targets > 0)).double().mean()))
    p = logits.flatten().sigmoid()
    wanted = sk.roc_auc_score(torch.cat([1 - targets.flatten(), targets.flatten()]), torch.cat([1 - p, p]))
    assert record.auc == pytest.approx(wanted, abs=1e-6)


def test_values_are_ranked_by_their_loss():
    result = run(task(lambda x: x[:, 0] * 3, 1), local={"lr": 0.01})
    assert (result.ranked_by, result.higher_is_better) == ("loss", False)
    assert result.score == result.loss
    assert result.personal_score > 0
    assert math.isnan(result.accuracy)
    named = run(task(lambda x: x[:, 0] * 3, 1, metric=["r2", "mae", "mse"]), local={"lr": 0.01})
    assert named.table[-1].metrics["mse"] == pytest.approx(named.loss, rel=1e-5)
    assert named.score < 1
    counts = run(
        task(lambda x: (x[:, 0] * 3).round(), 1, loss=lambda out, y: (out[:, 0] - y).abs()), local={"lr": 0.01}
    )
    assert (counts.ranked_by, math.isnan(counts.accuracy), math.isnan(counts.table[-1].auc)) == ("loss", True, True)


def test_a_client_without_meaning_for_a_metric_is_not_counted():
    def area(outputs, targets):
        if len(targets.unique()) < 2:
            raise ValueError("only one class")
        return sk.roc_auc_score(targets, outputs[:, 1])

    x, y = torch.randn(8, 2, generator=G), torch.arange(8) % 2
    data = Task(lambda: nn.Linear(2, 2), [(x, y), (x, y)], [(x, y), (x, 0 * y)], metric=area)
    result = run(data)
    logits = x @ result.model["weight"].T + result.model["bias"]
    assert result.personal_score == pytest.approx(area(logits, y))


BAD = {
    "metric is 3; give a name": 3,
    "the metric is a function without a name": lambda outputs, y: 1.0,
    "the metric 'mse' stands twice": ["mse", "mse"],
    "metric is an empty list": [],
    "no metric is called 'acc'": "acc",
}


@pytest.mark.parametrize("sentence", BAD)
def test_refusals(sentence):
    with pytest.raises(ConfigError, match=sentence):
        task(metric=BAD[sentence])


def test_a_metric_that_does_not_fit_is_refused_before_the_first_round(tmp_path):
    def vector(outputs, targets):
        return outputs

    with pytest.raises(ConfigError, match=r"the metric 'vector' gives no number for outputs of shape \(36, 3\)"):
        run(task(metric=vector), out=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"the metric 'mse' gives no number .* are not one value for each target"):
        run(task(metric="mse"))
    assert not (tmp_path / "a").exists()
