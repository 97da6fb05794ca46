"""environment.json and log.txt: what a run ran on, and what it said."""

import getpass
import json
import logging
import re
import warnings

import pytest

import sparing
from sparing.runs import environment as env
from sparing.runs.files.log import log_to_file

STUDY = {"task": {"data": "digits", "clients": 4, "model": "mlp"}, "plan": {"threads": 1}}
STAMP = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")


def lines(path):
    text = path.read_text().splitlines()
    assert all(STAMP.match(line) for line in text)
    return [STAMP.sub("", line) for line in text]


@pytest.fixture
def stopped(tmp_path):
    """A run of three rounds that was stopped after the second."""

    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sparing.run(method="topk", rounds=3, out=tmp_path / "run", loggers=[stop], **STUDY)
    return tmp_path / "run"


def test_a_log_has_every_round_and_goes_on_when_resumed(stopped):
    sparing.resume(stopped)
    said = lines(stopped / "log.txt")
    assert [line.split(" ")[0] for line in said] == [
        "sparing", "round", "round", "stopped:", "sparing", "round", "finished",
    ]  # fmt: skip
    assert said[0].endswith("after round 0")
    assert said[3] == "stopped: KeyboardInterrupt"
    assert said[4].endswith("after round 2")
    assert re.match(r"round 3 accuracy=0\.\d{4} personal=0\.\d{4} train_loss=\d.* clients=2 up=\d+ down=\d+", said[5])


def test_the_environment_names_versions_and_no_people_or_places(stopped):
    text = (stopped / "environment.json").read_text()
    found = json.loads(text)
    assert set(found) == {"sparing", "commit", "python", "torch", "numpy", "platform", "cores", "device"}
    assert found["sparing"] == sparing.__version__
    assert found["device"] == "cpu"
    assert getpass.getuser() not in text
    assert "/" not in text


def test_no_commit_outside_a_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(env, "_PACKAGE_FOLDER", tmp_path)
    assert env.package_commit.__wrapped__() is None
    assert "commit" in env.describe_environment("cpu")


def test_warnings_and_debug_lines_are_kept_if_they_are_let_through(tmp_path):
    log, before = logging.getLogger("sparing"), warnings.showwarning
    handlers = list(log.handlers)
    shown = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with log_to_file(tmp_path / "log.txt", "opening"):
            warnings.warn("watch\nout", stacklevel=1)
            log.debug("unheard")
            log.warning("heard")
            log.setLevel(logging.DEBUG)
            log.debug("Sparsity: %.2f%%", 90)
            log.setLevel(logging.NOTSET)
        shown = [str(warning.message) for warning in caught]
    assert lines(tmp_path / "log.txt") == ["opening", "warning: watch out", "heard", "Sparsity: 90.00%", "finished"]
    assert shown == ["watch\nout"]
    assert warnings.showwarning is before
    assert log.handlers == handlers


def test_a_refusal_is_in_the_log_too(tmp_path):
    with pytest.raises(sparing.SparingError):
        sparing.run(rounds=2, out=tmp_path / "run", local={"lr": 1e30}, **STUDY)
    assert "stopped: client" in lines(tmp_path / "run" / "log.txt")[-1]


def test_the_debug_lines_people_look_for(caplog):
    caplog.set_level(logging.DEBUG, "sparing")
    sparing.run(method=[{"sr-fedavg": {"topk": 0.1, "warmup": 0}}], rounds=2, sample=2, **STUDY)
    assert re.search(r"Round 2: c_min=[01]\.\d{4}, c_max=[01]\.\d{4}", caplog.text)
    shares = [float(share) for share in re.findall(r"Sparsity: (\d+\.\d\d)%", caplog.text)]
    assert len(shares) == 4
    assert all(89 < share < 91 for share in shares)
