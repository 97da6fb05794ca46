"""`sparing bench`: what it times is the study it was given."""

import json

import pytest
from typer.testing import CliRunner

from sparing.cli.app import app
from sparing.core.errors import ConfigError
from sparing.runs.speed import _time_rounds, measure_speed
from sparing.runs.study import study_from

STUDY = {"task": {"clients": 4, "model": "mlp"}, "sample": 3, "plan": {"threads": 1}, "method": "topk+int8"}


def test_the_parts_of_a_round_add_up():
    speed = _time_rounds(study_from(STUDY), 3)
    assert (speed.method, speed.rounds, speed.clients) == ("topk+int8", 3, 3)
    assert 0 < speed.fastest <= speed.seconds <= speed.slowest
    assert 0 < speed.training_seconds < speed.slowest
    assert speed.evaluation_seconds > 0
    assert speed.clients_per_second == pytest.approx(3 / speed.seconds)


def test_what_a_run_would_refuse_is_refused():
    with pytest.raises(ConfigError, match="sample asks for 50"):
        measure_speed(study_from({**STUDY, "sample": 50}), 1)


def test_fedavg_stands_beside_the_method(monkeypatch):
    asked = []

    def here(study, rounds):
        asked.append((study.method, rounds))
        return _time_rounds(study, rounds)

    monkeypatch.setattr("sparing.runs.speed.measure_speed", here)
    items = ["task.clients=4", "task.model=mlp", "plan.threads=1"]
    rows = json.loads(CliRunner().invoke(app, ["bench", *items, "method=topk", "--rounds", "2", "--json"]).stdout)
    assert asked == [(["fedavg"], 2), (["topk"], 2)]
    assert [row["method"] for row in rows] == ["fedavg", "topk"]
    text = CliRunner().invoke(app, ["bench", *items, "--rounds", "1"]).stdout
    assert "fedavg" in text
    assert "Medians of 1 round" in text
    assert max(map(len, text.splitlines())) <= 80
