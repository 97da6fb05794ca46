"""Code that a study names: found, trusted, called, kept."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

import sparing
from sparing.cli.app import app
from sparing.core.errors import ConfigError, DataError
from sparing.tasks.build import build_task
from sparing.tasks.code import CodeCall, code_file, load_code, place_beside
from sparing.tasks.trust import is_trusted, trust, trust_record
from support import Stop, stop_after

MINE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, x):
        return self.layers(x)

def samples(n, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=draw)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()

def load(clients=4):
    return [samples(20 + i, i) for i in range(clients)]

def load_tests():
    return load(3), [samples(5, 90 + i) for i in range(3)]

def pool():
    return {"train": samples(80, 1), "test": samples(20, 2)}

def numbers():
    return [(x, x[:, :1] * 2) for x, _ in load()]

def hits(outputs, targets):
    return float((outputs.argmax(1) == targets).double().mean())

def halved(output, y, by=0.5):
    return by * nn.functional.cross_entropy(output, y, reduction="none")

where = __file__
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def sparing_says(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def write_study(path="study.yaml", **task):
    values = {"task": task, "rounds": 2, "sample": 2, "local": {"epochs": 1, "lr": 0.1}}
    Path(path).write_text(yaml.safe_dump(values))
    return path


def trust_mine():
    trust(code_file(CodeCall("mine.py:Net")).sha256, Path("mine.py"))


def test_model_data_and_loss_of_ones_own_from_python():
    task = {"data": {"mine.py:load": {"clients": 5}}, "model": {"mine.py:Net": {"width": 3}}, "loss": "mine.py:halved"}
    own = sparing.run(task, rounds=2, sample=2, local={"epochs": 1}, seed=1)
    trust_mine()
    net, load, loss = (load_code(CodeCall(f"mine.py:{name}")) for name in ("Net", "load", "halved"))
    built = build_task("mine.py:load", split=None, model="mine.py:Net", seed=1)
    assert len(built) == 4
    assert built.test is not None
    assert int(built.test.count.sum()) > 0
    same = sparing.run(task, rounds=2, sample=2, local={"epochs": 1}, seed=1)
    task = {**task, "loss": {"mine.py:halved": {"by": 2.0}}}
    other = sparing.run(task, rounds=2, sample=2, local={"epochs": 1}, seed=1)
    assert same.model_sha256 == own.model_sha256 != other.model_sha256
    assert net(classes=3).layers[-1].out_features == 3
    assert len(load()) == 4
    assert loss(torch.zeros(2, 3), torch.zeros(2).long()).shape == (2,)


def test_a_metric_of_ones_own():
    write_study(data="mine.py:load", model="mine.py:Net")
    said = sparing_says("run", "study.yaml", "evaluate.metrics=[accuracy, mine.py:hits]", "--trust", "--json")
    assert said.exit_code == 0, said.output
    assert "evaluate.metrics.0 runs mine.py:hits" in said.output
    assert list(Path("runs").glob("*/code/mine-*.py"))


def test_what_a_loader_may_return():
    trust_mine()
    given = build_task("mine.py:load_tests", split=None, model="mine.py:Net")
    assert given.test is not None
    assert given.test.count.tolist() == [5, 5, 5]
    assert given.train.count.tolist() == [20, 21, 22], "nothing is cut where tests are given"
    shared = build_task("mine.py:pool", clients=5, split="iid", model="mine.py:Net")
    assert len(shared) == 5
    assert int(shared.train.count.sum()) == 80
    regression = build_task("mine.py:numbers", split=None, model={"mine.py:Net": {"width": 5}})
    assert regression.build(0).layers[-1].out_features == 1
    assert build_task("mine.py:load", split=None, model="mlp").build(0) is not None, "our networks on one's own data"


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"data": "mine.py:load", "split": "iid"}, r"returned clients, and task.split would share out one \(x, y\)"),
        ({"data": "mine.py:pool", "split": None}, r"returned one \(x, y\) and no clients; set task.split, such as iid"),
        ({"data": {"mine.py:load": {"client": 3}}}, "has no option 'client'; did you mean 'clients'"),
        ({"data": "mine.py:laod"}, "mine.py defines no 'laod'; did you mean 'load'"),
        ({"data": "mine.py:where"}, "mine.py:where is a str; name a class or a function"),
        ({"data": "gone.py:load"}, "there is no file gone.py beside the study or under this folder"),
        ({"data": "digits", "split": None}, "task.split is null, but digits does not say who holds what"),
        ({"data": "digits", "loss": "huber"}, "task.loss is 'huber'; name a function that gives one number per sample"),
        ({"data": "digits", "model": "no.such.module:Net"}, "cannot import no.such.module"),
        ({"data": "digits", "model": "mine.py:samples"}, "mine.py:samples needs 'n'"),
    ],
)
def test_mistakes_are_one_sentence(task, says):
    task = {"model": "mine.py:Net", **task} if task["data"] != "digits" else task
    with pytest.raises((ConfigError, DataError), match=says):
        sparing.run(task, rounds=1)


def test_a_study_from_elsewhere_runs_no_code_before_it_is_trusted():
    study = write_study(data="mine.py:load", model="mine.py:Net")
    for command in ("run", "check", "bench"):
        said = sparing_says(command, study)
        assert said.exit_code == 2
        assert "look at it, then add --trust" in said.output
        assert not Path("runs").exists()
    assert sparing_says("run", study, "--trust").exit_code == 0
    again = sparing_says("run", study)
    assert again.exit_code == 0, "known by now"
    assert "task.model runs mine.py:Net" in again.output
    Path("mine.py").write_text(MINE + "\n# another line\n")
    assert "you have not run before" in sparing_says("run", study).output
    assert oct(trust_record().stat().st_mode & 0o777) == "0o600"


def test_code_named_on_the_command_line_is_the_users_own():
    said = sparing_says("run", "task.data=mine.py:load", "task.model=mine.py:Net", "rounds=1", "sample=2")
    assert said.exit_code == 0, said.output


def test_a_run_keeps_its_code_and_goes_on_with_it(home, monkeypatch):
    task = {"data": "mine.py:load", "model": "mine.py:Net"}
    whole = sparing.run(task, rounds=4, sample=2, local={"epochs": 1}, out="whole")
    with pytest.raises(Stop):
        sparing.run(task, rounds=4, sample=2, local={"epochs": 1}, out="half", loggers=[stop_after(2)])
    shutil.copytree("half", "copy")
    shutil.copytree("half", "third")
    Path("mine.py").write_text("raise RuntimeError('another file by now')\n")
    assert sparing.resume("copy").model_sha256 == whole.model_sha256
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "somebody else"))
    with pytest.raises(ConfigError, match="you have not run before"):
        sparing.resume("third")
    assert sparing.resume("third", trust=True).model_sha256 == whole.model_sha256


def test_files_elsewhere_are_refused(home, monkeypatch):
    (home / "here").mkdir()
    (home / "beside").mkdir()
    (home / "beside" / "net.py").write_text(MINE)
    assert place_beside("net.py:Net", (home / "beside", Path())) == "beside/net.py:Net"
    monkeypatch.chdir(home / "here")
    assert place_beside("net.py:Net", (home / "beside", Path())).endswith("/beside/net.py:Net")
    for reference in ("../mine.py:Net", f"{home}/mine.py:Net"):
        with pytest.raises(ConfigError, match="lies elsewhere; code must lie beside the study or under this folder"):
            place_beside(reference, (home / "beside", Path()))
    (home / "here" / "link.py").symlink_to(home / "mine.py")
    with pytest.raises(ConfigError, match="lies elsewhere"):
        place_beside("link.py:Net", (Path(),))


def test_explain_compare_and_report_run_no_code():
    task = {"data": "mine.py:load", "model": "mine.py:Net"}
    sparing.run(task, rounds=1, sample=2, out="runs/a")
    for path in ("mine.py", next(Path("runs/a/code").iterdir())):
        Path(path).write_text("raise SystemExit('code was run')\n")
    assert sparing_says("compare", "runs").exit_code == 0
    assert sparing_says("report", "runs", "--out", "page.html").exit_code == 0
    said = sparing_says("explain", "fedavg", "--model", "mine.py:Net")
    assert said.exit_code == 2
    assert "explain runs no code but sparing's" in said.output


def test_nothing_under_this_folder_takes_the_place_of_an_installed_package(home):
    package = home / "xmlrpc"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('code was run')\n")
    (home / "wsgiref.py").write_text("raise SystemExit('code was run')\n")
    for reference in ("xmlrpc.client:dumps", "wsgiref.util:guess_scheme"):
        call = CodeCall(reference)
        with pytest.raises(ConfigError, match="would call"):
            load_code(call)
        trust(code_file(call).sha256, Path(reference))
        assert callable(load_code(call))
    ours = CodeCall("sparing.runs.start:run")
    trust(code_file(ours).sha256, Path("x"))
    with pytest.raises(ConfigError, match="is sparing's own"):
        load_code(ours)


def test_what_a_file_only_imports_is_not_called():
    Path("mine.py").write_text("from shutil import rmtree\n" + MINE)
    trust_mine()
    with pytest.raises(ConfigError, match=r"mine\.py only imports rmtree"):
        load_code(CodeCall("mine.py:rmtree", {"path": "."}))


def test_typing_one_name_trusts_no_other(home):
    write_study(data="mine.py:load")
    (home / "notmine.py").write_text(MINE)
    said = sparing_says("run", "study.yaml", "task.model=notmine.py:Net")
    assert said.exit_code == 2
    assert "mine.py:load would run mine.py" in said.output
    write_study(model={"mine.py:Net": {"width": 3}})
    assert sparing_says("run", "study.yaml", "task.data=mine.py:load").exit_code == 2, "nor options of the study"


def test_code_is_not_swept_nor_drawn():
    study = {"task": {"data": "mine.py:load", "validation": 0.2}, "sweep": {"task.model": ["mine.py:Net"]}}
    Path("study.yaml").write_text(yaml.safe_dump(study))
    said = sparing_says("sweep", "study.yaml", "--trust")
    assert said.exit_code == 2
    assert "sweep.task.model names code" in said.output
    assert "data runs no code but sparing's" in sparing_says("data", "mine.py:load").output


def test_nothing_steers_the_terminal():
    write_study(data={"wsgiref.util:guess_scheme": {"a\x1b[2K": 1}}, model="mlp")
    assert "\x1b" not in sparing_says("run", "study.yaml").output


def test_a_call_of_an_installed_package_is_trusted_with_its_options():
    study = write_study(data={"shutil.nothing:rmtree": {"path": "precious"}}, model="mlp")
    said = sparing_says("run", study)
    assert said.exit_code == 2
    assert "would call shutil.nothing:rmtree(path='precious'), which you have not done before" in said.output
    harmless = CodeCall("torch.nn:Linear", {"in_features": 2})
    call = code_file(harmless)
    trust(call.sha256, call.path)
    assert load_code(harmless) is torch.nn.Linear
    with pytest.raises(ConfigError, match=r"would call torch.nn:Linear\(in_features=3\)"):
        load_code(CodeCall("torch.nn:Linear", {"in_features": 3}))


def test_the_record_forgives_what_is_damaged():
    trust_record().parent.mkdir(parents=True)
    trust_record().write_bytes(b"\xff\xfe nonsense\n\nabc")
    assert not is_trusted("f" * 64)
    trust("f" * 64, Path("x\ny.py"))
    assert is_trusted("f" * 64)
    assert len(trust_record().read_bytes().splitlines()) == 4
