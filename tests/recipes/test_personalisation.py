"""FedPer, LG-FedAvg, FedRep, FedBABU, Ditto and fine-tuning in whole runs, and what they are at their limits."""

import copy
import math

import pytest
import torch
from torch import nn

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Trained
from sparing.core.round import client, first_client, first_server, outgoing
from sparing.core.tree import layout_of, tree_of
from sparing.models import build_network
from sparing.runs.explanation import explain_method
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.start import new_run, settle_study, task_from_study
from sparing.runs.study import study_from
from support import make_ctx

TASK = {"data": "digits", "clients": 8, "held_out": 2, "model": "mlp"}
STUDY = {"rounds": 3, "sample": 4, "seed": 5, "local": {"steps": 3}, "evaluate": {"every": 3}}
ALL_KINDS = {"who": ["global", "before", "after"]}
HEAD = ("head.weight", "head.bias")


def play(method, **options):
    return sparing.run(TASK, method, **STUDY | {"plan": {"path": "loop", "chunk": 3, "threads": 1}} | options)


def rows(method, **options):
    """What every client keeps after the last round."""
    study = study_from({"task": TASK, "method": method, **STUDY, "plan": {"path": "loop", "chunk": 3}, **options})
    job, study = settle_study(study, task_from_study(study))
    run = new_run(study, job, None)
    for t in range(1, study.rounds + 1):
        run.server, _ = run.engine.round(run.server, job.fleet.cohort(study.seed, t, 8, 4), t)
    return run.bank.read(torch.arange(8))


def same(one, other):
    assert one.model_sha256 == other.model_sha256
    assert (one.up_bytes, one.down_bytes) == (other.up_bytes, other.down_bytes)
    for a, b in zip(one.table, other.table, strict=True):
        measured = [
            str({k: v for k, v in record.__dict__.items() if k not in ("seconds", "after_accuracy", "train_loss")})
            for record in (a, b)
        ]
        assert measured[0] == measured[1]


@pytest.mark.parametrize(
    "method",
    [
        "fedper",
        "lg-fedavg",
        "fedrep",
        "fedbabu",
        "ditto",
        "finetune",
        "psfed+fedrep+int8",
        "fedbabu+topk+memory+fedadam",
        "psfed+ditto+topk+int8+memory",
        "prune+ditto",
        "ditto+prune",
        "fedper+ditto",
        "lg-fedavg+fedprox+finetune",
    ],
)
def test_both_engines_and_both_banks_agree(method):
    fast = play(method, fleet={"dropout": 0.2}, plan={"path": "loop", "chunk": 3, "bank": "file"})
    plain = play(method, fleet={"dropout": 0.2}, engine="debug", plan={"path": "loop"})
    same(fast, plain)
    assert str(fast.table[-1].after_accuracy) == str(plain.table[-1].after_accuracy)


def test_fedper_is_personal_by_its_name():
    same(play("fedper"), play("personal"))
    layers = {"personalization": {"personalized_layers": ["dense1"]}}
    same(play("fedper", **layers), play([{"personal": {"layers": ["dense1"]}}]))


def test_lg_fedavg_keeps_all_but_the_head():
    same(play("lg-fedavg"), play([{"personal": {"shared": ["head"]}}]))
    same(play("lg-fedavg", personalization={"shared_layers": ["dense1"]}), play([{"personal": {"shared": ["dense1"]}}]))


def test_fedrep_with_no_time_for_the_head_alone_is_fedper():
    limit = [{"fedrep": {"head": 0, "body": None}}]
    same(play(limit), play("fedper"))
    for name, x in rows(limit).items():
        assert torch.equal(x, rows("fedper")[name])
    apart = play([{"fedrep": {"head": 3, "body": 3}}])
    assert apart.model_sha256 != play("fedper").model_sha256


def test_fedbabu_with_no_layer_in_the_head_is_fedavg_and_tuned_it_is_finetune():
    limit = [{"fedbabu": {"layers": [], "epochs": 2}}]
    same(play(limit, evaluate=ALL_KINDS), play("fedavg", evaluate=ALL_KINDS))
    tuned = play([{"finetune": {"epochs": 2}}])
    same(play(limit), tuned)
    assert play(limit).table[-1].after_accuracy == tuned.table[-1].after_accuracy
    assert play("fedbabu").model_sha256 != tuned.model_sha256


def test_fedbabu_leaves_the_head_as_it_was_built_and_never_sends_it():
    study = study_from({"task": TASK, **STUDY})
    start = task_from_study(study).build(5).state_dict()
    after = play("fedbabu").model
    kept = rows("fedbabu")
    for name in HEAD:
        assert torch.equal(after[name], start[name])
        assert all(torch.equal(x, start[name]) for x in kept[f"own/{name}"])
    assert not torch.equal(after["dense1.weight"], start["dense1.weight"])
    net = build_network("cnn", (1, 8, 8), 10)
    layout, tree = layout_of(net), tree_of(net)
    for method in ("fedbabu", "fedrep", "fedper", "ditto"):
        made = compose(layout, *recipes_from_entries([method]))
        down = outgoing(made, first_server(made, tree, 5), make_ctx([0, 3]))
        up, _ = client(made, first_client(made, tree), down, still, make_ctx([0, 3]))
        shared = set(layout.shapes) - (set() if method == "ditto" else set(HEAD))
        assert set(up.leaves) == set(down.leaves) == shared, method


def still(lesson, ctx):
    k = len(ctx.ids)
    return Trained(
        {n: x.expand(k, *x.shape[1:]).clone() for n, x in lesson.start.items()}, lesson.memory, {"loss": torch.zeros(k)}
    )


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_dittos_global_model_is_fedavgs(lam):
    ours, plain = play([{"ditto": {"lam": lam}}]), play("fedavg")
    assert ours.model_sha256 == plain.model_sha256
    assert (ours.up_bytes, ours.down_bytes) == (plain.up_bytes, plain.down_bytes)
    assert ours.accuracy == plain.accuracy
    assert ours.table[-1].train_loss == plain.table[-1].train_loss
    assert ours.personal_accuracy != plain.personal_accuracy


def test_dittos_second_model_is_local_training_where_nothing_draws_it():
    mine, alone = rows([{"ditto": {"lam": 0.0}}]), rows("local")
    for name, x in alone.items():
        assert torch.equal(mine[f"{name}.second"], x)
    free, bound = play([{"ditto": {"lam": 0.0}}]), play("local")
    assert free.personal_accuracy == bound.personal_accuracy
    assert free.table[-1].new_accuracy == bound.table[-1].new_accuracy
    drawn = rows([{"ditto": {"lam": 2.0}}])
    assert not torch.equal(drawn["own/head.weight.second"], alone["own/head.weight"])


@pytest.mark.parametrize("buffers", ["shared", "own", "static"])
def test_dittos_second_model_has_statistics_of_its_own(buffers):
    x, y = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    pairs = [(x[:20], y[:20]), (3 * x[20:] + 1, y[20:])]
    options = {"rounds": 3, "sample": 1.0, "local": {"steps": 2, "buffers": buffers}, "plan": {"path": "loop"}}
    tasks = [sparing.Task(copy.deepcopy(net), pairs, test=pairs) for _ in range(3)]
    ours, plain = sparing.run(tasks[0], [{"ditto": {"lam": 0}}], **options), sparing.run(tasks[1], **options)
    assert ours.model_sha256 == plain.model_sha256
    assert ours.personal_accuracy == sparing.run(tasks[2], "local", **options).personal_accuracy


def test_finetune_trains_as_fedavg_and_measures_after_tuning():
    tuned, plain = play("finetune"), play("fedavg", evaluate={"every": 3, "who": ["global", "before", "after"]})
    same(tuned, plain)
    assert tuned.table[-1].after_accuracy == plain.table[-1].after_accuracy
    longer = play([{"finetune": {"epochs": 12, "lr": 0.05}}]).table[-1].after_accuracy
    assert longer != plain.table[-1].after_accuracy
    assert math.isnan(play("fedavg").table[-1].after_accuracy)


@pytest.mark.parametrize("bank", ["memory", "file"])
def test_resuming_changes_nothing(tmp_path, bank):
    plan = {"path": "loop", "bank": bank}
    straight = play("ditto+topk+memory", rounds=4, plan=plan, out=tmp_path / "a")

    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 2:
            raise Stop

    with pytest.raises(Stop):
        play("ditto+topk+memory", rounds=4, plan=plan, out=tmp_path / "b", loggers=[stop])
    resumed = sparing.resume(tmp_path / "b")
    assert resumed.model_sha256 == straight.model_sha256
    assert resumed.personal_accuracy == straight.personal_accuracy


def test_explain_says_what_stays():
    assert explain_method("fedrep", "cnn", (1, 8, 8), 10).private == ["head"]
    assert explain_method("lg-fedavg", "cnn", (1, 8, 8), 10).private == ["conv1", "conv2", "dense"]
    ours, plain = (explain_method(method, "cnn", (1, 8, 8), 10) for method in ("ditto", "fedavg"))
    assert ours.client_bytes == {"own": 4 * ours.parameters}
    assert ours.sizes == plain.sizes, "the second model costs no bytes"


@pytest.mark.parametrize(
    ("method", "error", "words"),
    [
        ("finetune+ditto", MethodError, "ditto and a recipe before it both say which model"),
        ("ditto+finetune", MethodError, "finetune and a recipe before it both say which model"),
        ("finetune+fedbabu", MethodError, "fedbabu and a recipe before it both say which model"),
        ("fedrep+fedbabu", MethodError, "fedbabu says which layers are trained when"),
        ([{"fedrep": {"shared": []}}], MethodError, "layers for the head and layers for the body"),
        ([{"fedrep": {"body": 0}}], ConfigError, "fedrep.body is 0; it must be 1 or more"),
        ([{"fedrep": {"head": -1}}], ConfigError, "fedrep.head is -1"),
        ([{"fedbabu": {"layers": [], "tune": "head"}}], MethodError, "tunes head, but no layer is left"),
        ([{"fedbabu": {"shared": []}}], MethodError, "trains the body"),
        ([{"fedbabu": {"lr": 0}}], ConfigError, "fedbabu.lr is 0.0; it must be above 0"),
        ([{"finetune": {"epochs": 0}}], ConfigError, "finetune.epochs is 0"),
        ([{"lg-fedavg": {"layers": []}}], MethodError, "no layer is left for it"),
        ([{"ditto": {"lam": -1}}], ConfigError, "ditto.lam is -1"),
        ([{"ditto": {"epochs": 0}}], ConfigError, "ditto.epochs is 0"),
        ([{"ditto": {"lr": -0.1}}], ConfigError, "ditto.lr is -0.1; it must be above 0"),
        (["ditto", {"fedhm": {"full": 0}}], MethodError, "cannot keep a copy"),
        (["fedrep", {"fedhm": {"full": 0}}], MethodError, "is trained apart from other layers"),
    ],
    ids=str,
)
def test_what_cannot_be_meant(method, error, words):
    with pytest.raises(error, match=words):
        play(method)
