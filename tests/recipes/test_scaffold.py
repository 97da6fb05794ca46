"""SCAFFOLD in whole runs: means that stay means, bytes, engines, banks, and what it cannot stand beside."""

import pytest
import torch

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.tree import layout_of
from sparing.models import build_network
from sparing.recipes.scaffold import scaffold
from sparing.runs.explanation import explain_method
from sparing.runs.start import new_run, settle_study, task_from_study
from sparing.runs.study import study_from

TASK = {"data": "digits", "clients": 9, "held_out": 2, "model": "mlp"}
STUDY = {"rounds": 4, "sample": 4, "seed": 5, "local": {"steps": 3}, "evaluate": {"every": 4}}
LOSSY = {"dropout": 0.3}
BY_SAMPLES = {"scaffold": {"weights": "samples"}}


def play(method, **options):
    return sparing.run(TASK, method, **STUDY | {"plan": {"path": "loop", "chunk": 3, "threads": 1}} | options)


METHODS = [
    "scaffold",
    [BY_SAMPLES],
    "personal+scaffold+int8",
    "psfed+scaffold",
    [BY_SAMPLES, "psfed+topk+memory+fedavgm"],
    "fedrep+scaffold+fedadam",
    "ditto+scaffold",
    "scaffold+ditto",
    "scaffold+local",
]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_both_engines_and_both_banks_agree(method):
    fast = play(method, fleet=LOSSY, plan={"path": "loop", "chunk": 3, "bank": "file"})
    plain = play(method, fleet=LOSSY, engine="debug", plan={"path": "loop"})
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert fast.personal_accuracy == plain.personal_accuracy
    assert fast.table[-1].new_accuracy == plain.table[-1].new_accuracy


@pytest.mark.parametrize("method", METHODS[:5], ids=str)
def test_the_servers_control_variate_is_the_mean_of_all_clients(method):
    """Also when few take part, uploads are lost, some are held out, and codecs round the model."""
    study = study_from({"task": TASK, "method": method, **STUDY, "fleet": LOSSY, "plan": {"path": "loop", "chunk": 3}})
    job, study = settle_study(study, task_from_study(study))
    run = new_run(study, job, None)
    ids, lost = torch.ones(9, dtype=torch.bool), 0
    ids[job.task.held_out] = False
    ids = ids.nonzero()[:, 0]
    weight = job.task.train.count[ids].double() if "samples" in str(method) else torch.ones(7).double()
    for t in range(1, 7):
        cohort = job.fleet.cohort(study.seed, t, 9, 4)
        run.server, outcome = run.engine.round(run.server, cohort, t)
        lost += int((~outcome.arrived).sum())
        mine = run.bank.read(ids)
        for name in job.method.layout.params:
            if f"{name}.control" in run.server.model:
                want = torch.einsum("k,k...->...", weight / weight.sum(), mine[f"local/control/{name}"].double())
                torch.testing.assert_close(run.server.model[f"{name}.control"][0].double(), want, atol=1e-6, rtol=1e-5)
    assert lost
    assert any(x.abs().max() > 1e-3 for name, x in run.server.model.items() if name.endswith(".control"))


def test_both_ways_carry_twice_as_much_and_explain_says_so():
    ours, plain = (explain_method(method, "cnn", (1, 8, 8), 10) for method in ("scaffold", "fedavg"))
    (ours,), (plain,) = ours.sizes, plain.sizes
    for way, once in ((ours.down, plain.down), (ours.up, plain.up)):
        assert way.buffers == way.parameters == once.parameters
        assert 2 * once.bytes - 64 < way.bytes < 2 * once.bytes + 64
    whole = explain_method("personal+scaffold", "cnn", (1, 8, 8), 10)
    assert whole.client_bytes["local/control"] == 4 * (whole.parameters - 10 * 65)
    assert whole.steps == ["scaffold"]
    assert whole.weighing == "uniform"


def test_the_first_round_is_fedavg():
    """Every control variate is zero then. Weights by samples, as FedAvg has them."""
    ours, plain = play([BY_SAMPLES], rounds=1), play("fedavg", rounds=1)
    assert all(torch.equal(ours.model[name], x) for name, x in plain.model.items())
    assert set(ours.model) == set(plain.model), "the trained model holds no control variates"
    two = play([BY_SAMPLES], rounds=2).model, play("fedavg", rounds=2).model
    assert not torch.equal(two[0]["head.weight"], two[1]["head.weight"])


@pytest.mark.parametrize("bank", ["memory", "file"])
def test_resuming_changes_nothing(tmp_path, bank):
    plan = {"path": "loop", "bank": bank}
    straight = play("personal+scaffold", plan=plan, out=tmp_path / "a")

    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        play("personal+scaffold", plan=plan, out=tmp_path / "b", loggers=[stop])
    resumed = sparing.resume(tmp_path / "b")
    assert resumed.model_sha256 == straight.model_sha256
    assert resumed.personal_accuracy == straight.personal_accuracy


@pytest.mark.accel
def test_stacked_clients_come_to_the_same():
    study = STUDY | {"local": {"epochs": 1, "batch": 16}}
    one, other = (
        sparing.run(TASK, "scaffold+ditto", **study, plan={"path": path, "chunk": 3}) for path in ("loop", "stacked")
    )
    for name, x in one.model.items():
        torch.testing.assert_close(other.model[name], x, atol=1e-5, rtol=1e-4)
    assert one.up_bytes == other.up_bytes


def test_it_stands_once_in_a_method():
    layout = layout_of(build_network("mlp", (1, 8, 8), 10))
    with pytest.raises(MethodError, match="stands twice"):
        compose(layout, scaffold("samples"), scaffold("samples"))


def test_resetting_momentum_leaves_control_variates_alone():
    plain, reset = (play(["scaffold", {"psfed": {"reset_momentum": yes}}]) for yes in (False, True))
    assert reset.model_sha256 == plain.model_sha256


def test_evaluating_changes_no_control_variate():
    looked = play("scaffold", evaluate={"every": 1, "who": ["global", "before", "after"]})
    assert looked.model_sha256 == play("scaffold").model_sha256


@pytest.mark.parametrize(
    ("method", "local", "error", "words"),
    [
        ("scaffold", {"momentum": 0.9}, MethodError, "plain SGD in local training, seen momentum 0.9"),
        ("scaffold", {"optimiser": "adam"}, MethodError, "plain SGD in local training, seen adam"),
        ("scaffold+personal", {}, MethodError, "keeps layers at home"),
        ("scaffold+lg-fedavg", {}, MethodError, "keeps layers at home"),
        ("local+scaffold", {}, MethodError, "nothing to correct"),
        ("fedsim+scaffold", {}, MethodError, "both say how much a client counts"),
        (
            [BY_SAMPLES, "fedsim"],
            {},
            MethodError,
            "weights that stay the same; drop 'fedsim'",
        ),
        ([{"pfedsim": {"mode": "published"}}, BY_SAMPLES], {}, MethodError, "one model for all, .* drop 'pfedsim'"),
        (["scaffold", {"norm-bound": {"bound": 1.0}}], {}, MethodError, "updates as they are, .* drop 'norm-bound'"),
        (["scaffold", {"dp": {"mode": "local"}}], {}, MethodError, "drop 'dp'|both say how much"),
        ("scaffold+median", {}, MethodError, "'scaffold' needs a weighted mean"),
        (
            [BY_SAMPLES, {"fedhm": {"full": 0, "weighting": "samples"}}],
            {},
            MethodError,
            "cannot keep a copy or a memory",
        ),
        ([{"scaffold": {"weights": "size"}}], {}, ConfigError, "scaffold.weights is 'size'"),
    ],
    ids=str,
)
def test_what_it_cannot_stand_beside(method, local, error, words):
    with pytest.raises(error, match=words):
        play(method, local={"steps": 3} | local)
