import json

import pytest
from typer.testing import CliRunner

from sparing.cli.app import app
from sparing.runs.cost import StudyCost


def call(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def test_data_lists_and_draws(tmp_path):
    assert "cifar100" in call("data").stdout
    picture = tmp_path / "split.png"
    done = call("data", "digits", "split.dirichlet=0.1", "clients=10", "--out", picture)
    assert done.exit_code == 0
    assert "1,797 samples" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "probe: 20 samples" in call("data", "digits", "clients=10", "probe=20", "--out", picture).stdout


def test_data_as_json(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = json.loads(call("data", "digits", "split.dirichlet=0.1", "clients=10", "--json").stdout)
    assert sum(map(sum, told["counts"])) == 1797
    assert len(told["train"]) == 10
    assert "digits" in json.loads(call("data", "--json").stdout)
    assert not list(tmp_path.iterdir()), "no picture is drawn"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digit"], "digits"),
        (["digits", "split.dirichlet=0"], "alpha"),
        (["digits", "split.pathological=11"], "class"),
        (["digits", "split=writer"], "no writer ids"),
        (["digits", "clients=5000"], "5000 clients"),
    ],
)
def test_bad_splits_are_refused_in_one_line(arguments, words):
    done = call("data", *arguments)
    assert done.exit_code == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_check_says_what_a_run_will_cost(tmp_path, monkeypatch):
    keys = [
        "rounds=2",
        "method=psfed+topk+memory",
        "local.epochs=1",
        "plan.path=loop",
        "plan.chunk=5",
        "plan.threads=1",
    ]
    cost = json.loads(call("check", *keys, "--json").stdout)
    result = json.loads(call("run", *keys, "--out", tmp_path / "a", "--json").stdout)
    assert cost["parameters"] == 13706
    assert 0.9 < 2 * cost["up_bytes"] / result["up_bytes"] < 1.1
    assert 0.8 < (cost["first_bytes"] + cost["down_bytes"]) / result["down_bytes"] <= 1.4
    monkeypatch.setattr("sparing.runs.cost.check_study", lambda study: StudyCost(**cost))
    assert "13,706 parameters" in call("check", *keys).stdout
    assert not (tmp_path / "runs").exists()


def test_check_refuses_what_run_refuses():
    done = call("check", "method=memory")
    assert done.exit_code == 2
    assert "nothing to remember" in done.stderr
