"""Trackers: each against a stand-in with the documented calls; TensorBoard for real where it is installed."""

import json
import re
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

import sparing
from sparing.cli.app import app
from sparing.cli.trackers import TRACKERS, tracking
from sparing.core.errors import ConfigError

STUDY = {"rounds": 3, "sample": 2, "seed": 1, "plan": {"threads": 1}, "method": "topk"}
TASK = {"data": "digits", "clients": 4, "model": "mlp"}


class Said(list):
    """Every call, in order."""

    def __call__(self, name, answer=None):
        def call(*of, **named):
            self.append((name, of, named))
            return answer

        return call

    def of(self, name):
        return [(of, named) for known, of, named in self if known == name]


@pytest.fixture
def said(monkeypatch):
    """Stand-ins for all four."""
    said = Said()
    run = SimpleNamespace(info=SimpleNamespace(run_id="abc"), log=said("log"), finish=said("finish"))
    names = {
        "mlflow": ("set_experiment", "log_params", "log_metrics", "end_run"),
        "trackio": ("finish",),
        "wandb": (),
        "torch.utils.tensorboard": (),
        "tensorboard": (),
    }
    for module, calls in names.items():
        fake = ModuleType(module)
        fake.__spec__ = ModuleSpec(module, None)
        for call in calls:
            setattr(fake, call, said(call))
        monkeypatch.setitem(sys.modules, module, fake)
    answers = {"mlflow": ("start_run", run), "trackio": ("init", run), "wandb": ("init", run)}
    writer = SimpleNamespace(add_scalar=said("add_scalar"), close=said("close"))
    answers["torch.utils.tensorboard"] = ("SummaryWriter", writer)
    for module, (call, answer) in answers.items():
        setattr(sys.modules[module], call, said(call, answer))
    return said


def broken_and_resumed(name, folder):
    """Two rounds, a stop, the third."""

    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), tracking([name], folder) as log:
        sparing.run(TASK, out=folder, loggers=[log, stop], **STUDY)
    with tracking([name], folder) as log:
        return sparing.resume(folder, loggers=[log])


def test_tensorboard_gets_every_number_of_every_round(said, tmp_path):
    result = broken_and_resumed("tensorboard", tmp_path / "r")
    (opened, again) = said.of("SummaryWriter")
    assert opened == ((str(tmp_path / "r" / "tensorboard"),), {"purge_step": 1})
    assert again[1] == {"purge_step": 3}
    accuracy = [of[1:] for of, _ in said.of("add_scalar") if of[0] == "accuracy"]
    assert accuracy == [(r.accuracy, r.round) for r in result.table]
    assert len(said.of("close")) == 2


def test_mlflow_goes_on_with_the_same_run(said, tmp_path):
    result = broken_and_resumed("mlflow", tmp_path / "r")
    assert said.of("start_run") == [((), {"run_name": "r"}), ((), {"run_id": "abc"})]
    ((params,), _) = said.of("log_params")[0]
    assert (params["task.clients"], params["method"]) == (4, ["topk"])
    assert len(said.of("log_params")) == 1, "parameters cannot be written twice"
    metrics = [(of[0]["up_bytes"], named["step"]) for of, named in said.of("log_metrics")]
    assert metrics == [(r.up_bytes, r.round) for r in result.table]
    assert len(said.of("end_run")) == 2


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_others_go_on_under_the_same_name(said, tmp_path, name):
    result = broken_and_resumed(name, tmp_path / "r")
    first, second = (named for _, named in said.of("init"))
    assert first == second
    assert first["resume"] == "allow"
    assert json.loads((tmp_path / "r" / "tracked.json").read_text())[name] in first.values()
    assert [(of[0]["loss"], named["step"]) for of, named in said.of("log")] == [(r.loss, r.round) for r in result.table]
    assert len(said.of("finish")) == 2


def test_what_was_not_measured_is_not_told(said, tmp_path):
    with tracking(["wandb"], tmp_path / "r") as log:
        sparing.run(TASK, out=tmp_path / "r", loggers=[log], **STUDY, evaluate={"every": 2})
    values = [of[0] for of, _ in said.of("log")]
    assert ["accuracy" in one for one in values] == [False, True, True]
    assert all("round" not in one and "metrics" not in one for one in values)


def test_what_the_method_reports_is_told(said, tmp_path):
    study = {**STUDY, "method": "stein"}
    with tracking(["wandb", "mlflow"], tmp_path / "r") as log:
        result = sparing.run(TASK, out=tmp_path / "r", loggers=[log], **study)
    assert [of[0]["c_min"] for of, _ in said.of("log")] == result.metric("c_min")
    assert [of[0]["c_min"] for of, _ in said.of("log_metrics")] == result.metric("c_min")


def test_a_refused_study_opens_nothing(said, tmp_path):
    with pytest.raises(ConfigError), tracking(["wandb"], tmp_path / "r") as log:
        sparing.run(TASK, out=tmp_path / "r", loggers=[log], **{**STUDY, "sample": 50})
    assert not said


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_there_says_what_to_install(name, tmp_path, monkeypatch):
    monkeypatch.setattr("sparing.cli.trackers.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=rf"pip install 'sparing\[{name}\]'"), tracking([name], tmp_path):
        pass


def test_the_command_line_takes_several(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    items = ["task.clients=4", "task.model=mlp", "plan.threads=1", "rounds=1"]
    result = CliRunner().invoke(app, ["run", *items, "--track", "wandb", "--track", "mlflow", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rounds"] == 1
    assert len(said.of("log")) == len(said.of("log_metrics")) == 1
    unknown = CliRunner().invoke(app, ["run", *items, "--track", "wandbb"])
    assert unknown.exit_code == 2
    assert "did you mean 'wandb'?" in unknown.stderr


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_for_real(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = broken_and_resumed("tensorboard", tmp_path / "r")
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    told = [(e.step, e.value) for e in events.Scalars("accuracy")]
    assert told == [(r.round, pytest.approx(r.accuracy)) for r in result.table]


def test_what_the_page_on_trackers_shows_runs(capsys):
    page = Path(__file__).parents[2] / "docs" / "trackers.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(code, {})
    assert len(capsys.readouterr().out.splitlines()) == 2
