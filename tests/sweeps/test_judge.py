"""A sweep chooses by the first metric of its task, whichever way is better, and not among trials of other code."""

import json

import pytest
from typer.testing import CliRunner

import sparing
from made import record
from sparing.cli.app import app
from sparing.core.errors import ConfigError
from sparing.sweeps.folder import Trial, TrialScore, pareto_trials, starred_trials, winning_trial
from sparing.sweeps.judge import Judge, asked_judge, settled_judge
from sparing.sweeps.optuna_search import propose_settings
from sparing.sweeps.pruning import HopelessTrial, best_score, stop_below
from sparing.sweeps.spec import sweep_from
from sparing.train.named_metrics import Metric, read_metrics

OWN_FILE = """
import torch

def load():
    x = torch.randn(4, 40, 2, generator=torch.Generator().manual_seed(0))
    return [(one, one.sum(1, keepdim=True)) for one in x]

def net():
    return torch.nn.Linear(2, 1)

def largest_error(outputs, targets):
    return (outputs - targets).abs().max()

largest_error.higher_is_better = False
"""
MSE = Judge("mse", False)
STUDY = {
    "task": {"data": "my_file.py:load", "model": "my_file.py:net", "validation": 0.2},
    "rounds": 2,
    "sample": 2,
    "plan": {"path": "loop"},
}


def trial(number, *points):
    scores = {seed: TrialScore(value, sent, 0) for seed, (value, sent) in enumerate(points)}
    return Trial(number, {"local.lr": number}, list(range(len(points))), scores, {}, MSE)


def test_the_least_error_wins():
    trials = [trial(0, (0.9, 100)), trial(1, (0.8, 50)), trial(2, (0.7, 60)), trial(3, (0.7, 90))]
    assert winning_trial(trials).number == 2
    assert [one.number for one in pareto_trials(trials)] == [2, 1]
    seeded = [trial(0, (0.90, 100), (0.91, 100), (0.92, 100)), trial(1, (0.5, 100), (0.51, 100), (0.52, 100))]
    assert [one.number for one in starred_trials(seeded)] == [1]


def test_a_trial_is_stopped_above_the_median():
    look = stop_below({1: -2.0, 2: -1.0}, MSE)
    look(record(1, metrics={"mse": 1.5}))
    with pytest.raises(HopelessTrial, match=r"stopped after round 2: mse 1.2, above the median .* \(1\)"):
        look(record(2, metrics={"mse": 1.2}))
    assert best_score([record(1, metrics={"mse": 1.5}), record(2)], MSE) == -1.5


def test_a_search_learns_from_an_error():
    plan = sweep_from({"task": {"validation": 0.2}, "sweep": {"trials": 99, "local.lr": {"linear": [0.1, 10.0]}}})
    trials = []
    for number in range(30):
        settings = propose_settings(plan, trials, 0)
        trials.append(Trial(number, settings, [0], {0: TrialScore(settings["local.lr"], 10, 0)}, {}, MSE))
    assert sum(one.settings["local.lr"] for one in trials[15:]) / 15 < 3, "less error is at the lower end"


def test_what_a_sweep_may_judge_by():
    metrics = read_metrics(["mse", Metric("my_error", max, higher_is_better=False)])
    assert settled_judge(asked_judge(None, []), metrics) == MSE
    assert settled_judge(asked_judge("personal_my_error", ["mse", "f.py:my_error"]), metrics) == Judge(
        "personal_my_error", False
    )
    assert settled_judge(asked_judge("after_loss", []), metrics) == Judge("after_loss", False)
    assert settled_judge(asked_judge("worst_decile", []), metrics) == Judge("worst_decile")
    with pytest.raises(ConfigError, match=r"sweep\.judge is 'mse'"):
        asked_judge("mse", [])


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_file.py").write_text(OWN_FILE)
    return tmp_path


@pytest.mark.parametrize("metric", ["mse", "my_file.py:largest_error", None])
def test_a_regression_is_swept_by_its_error(own, metric):
    study = STUDY | ({"evaluate": {"metrics": [metric]}} if metric else {})
    found = sparing.sweep(study, {"local.lr": [1e-6, 0.05]}, out=own / "sweep", jobs=1, final=True)
    name = {"mse": "mse", None: "loss"}.get(metric, "largest_error")
    assert [one.judge for one in found.trials] == [Judge(name, False)] * 2
    assert found.best.settings == {"local.lr": 0.05}
    assert found.final.complete
    again = sparing.sweep(study, {"local.lr": [1e-6, 0.05]}, out=own / "sweep", jobs=1)
    assert again.trials == found.trials


def test_the_command_says_by_what_it_chose(own):
    study = json.dumps({**STUDY, "evaluate": {"metrics": ["mse"]}, "sweep": {"local.lr": [1e-6, 0.05]}})
    (own / "study.yaml").write_text(study)
    done = CliRunner().invoke(app, ["sweep", "study.yaml", "--jobs", "1", "--trust"])
    assert done.exit_code == 0, done.output
    said = " ".join(done.output.split())
    assert "mse" in said
    assert "Lower mse is better." in said
    assert "accura" not in said
    assert "%" not in said
    held = json.loads(CliRunner().invoke(app, ["sweep", "study.yaml", "--jobs", "1", "--json"]).stdout)
    assert (held["judge"], held["winner"]) == ("mse", 1)
    assert held["trials"][1]["value"]["mean"] < held["trials"][0]["value"]["mean"]


def test_trials_of_other_code_are_not_gone_on_with(own):
    sparing.sweep(STUDY, {"local.lr": [0.05]}, out=own / "sweep", jobs=1)
    (own / "my_file.py").write_text(OWN_FILE.replace("manual_seed(0)", "manual_seed(1)"))
    with pytest.raises(ConfigError, match=r"holds trials with another my_file\.py, which was edited since"):
        sparing.sweep(STUDY, {"local.lr": [0.05, 0.1]}, out=own / "sweep", jobs=1)
