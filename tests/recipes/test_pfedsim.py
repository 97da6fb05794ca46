import pytest
import torch

import sparing
from sparing.core.compose import compose
from sparing.core.errors import ConfigError, MethodError
from sparing.core.method import Trained
from sparing.core.round import client, first_client, first_server, outgoing
from sparing.core.tree import layout_of, tree_of
from sparing.models import build_network
from sparing.runs.recipe_entries import recipes_from_entries
from sparing.runs.study import study_from
from sparing.wire import nbytes
from support import changed, make_ctx

TASK = {"clients": 10, "split": {"dirichlet": 0.3}, "model": "cnn", "held_out": 2}
STUDY = {"rounds": 3, "sample": 5, "seed": 5, "local": {"steps": 2, "batch": 32}}
PUBLISHED = {"pfedsim": {"mode": "published", "warmup": 0.4}}
METRICS = {
    "shared_param_count", "personal_param_count", "avg_similarity", "similarity_variance", "max_weight", "min_weight",
    "weight_entropy",
}  # fmt: skip


def play(method, **options):
    return sparing.run(TASK, method, **STUDY | {"plan": {"path": "loop", "chunk": 3}} | options)


@pytest.mark.parametrize(
    "method",
    [
        "fedsim",
        "pfedsim",
        [{"pfedsim": {"at": "client"}}, "topk"],
        [{"pfedsim": {"on": "updates"}}],
        "psfed+pfedsim+int8",
        [PUBLISHED],
        [PUBLISHED, "topk+int8+memory"],
    ],
    ids=str,
)
def test_both_engines_and_both_banks_agree(method):
    rounds = 5 if "published" in str(method) else 3  # two of warm-up, three of blending
    plain = play(method, rounds=rounds, engine="debug", plan={"path": "loop"})
    fast = play(method, rounds=rounds, plan={"path": "loop", "chunk": 3, "bank": "file"})
    assert fast.model_sha256 == plain.model_sha256
    assert (fast.up_bytes, fast.down_bytes) == (plain.up_bytes, plain.down_bytes)
    for name in METRICS:
        assert str(fast.metric(name)) == str(plain.metric(name)), name
    assert [r.personal_accuracy for r in fast.table] == [r.personal_accuracy for r in plain.table]
    assert [r.new_accuracy for r in fast.table] == [r.new_accuracy for r in plain.table]
    assert fast.table[-1].new_accuracy > 0.1, "a client never met can start"
    assert fast.table[-1].metrics.keys() >= METRICS
    benefit = fast.table[-1].personal_accuracy - fast.table[-1].benefit
    assert 0 <= benefit <= 1, "the accuracy of the global model on the same samples"


def test_resuming_the_published_form_changes_nothing(tmp_path):
    straight = play([PUBLISHED], rounds=5, out=tmp_path / "a", plan={"path": "loop", "bank": "file"})

    class Stop(Exception):
        pass

    def stop(record):
        if record.round == 4:
            raise Stop

    with pytest.raises(Stop):
        play([PUBLISHED], rounds=5, out=tmp_path / "b", plan={"path": "loop", "bank": "file"}, loggers=[stop])
    resumed = sparing.resume(tmp_path / "b")
    assert resumed.model_sha256 == straight.model_sha256
    assert [r.personal_accuracy for r in resumed.table] == [r.personal_accuracy for r in straight.table]


def test_without_a_personal_layer_it_is_fedsim():
    ours = play("pfedsim", personalization={"personalized_layers": []})
    assert ours.model_sha256 == play("fedsim").model_sha256


@pytest.mark.parametrize("mode", ["seed", "published"])
def test_with_all_layers_personal_it_is_local_training(mode):
    ours, alone = play([{"pfedsim": {"mode": mode, "shared": []}}]), play("local")
    assert [r.personal_accuracy for r in ours.table] == [r.personal_accuracy for r in alone.table]
    assert (ours.up_bytes, ours.down_bytes) == (alone.up_bytes, alone.down_bytes)
    assert ours.model_sha256 == alone.model_sha256
    layout = layout_of(build_network("cnn", (1, 8, 8), 10))
    share = compose(layout, *recipes_from_entries([{"pfedsim": {"mode": mode, "shared": []}}])).share
    assert share.private == set(layout.shapes)


def test_warm_up_to_the_end_is_fedavg():
    ours, plain = play([{"pfedsim": {"mode": "published", "warmup": 1.0}}]), play("fedavg")
    assert ours.model_sha256 == plain.model_sha256
    assert (ours.up_bytes, ours.down_bytes) == (plain.up_bytes, plain.down_bytes)


def test_no_personal_tensor_is_in_any_message_of_the_seed_form():
    model = build_network("cnn", (1, 8, 8), 10)
    layout, tree = layout_of(model), tree_of(model)
    method = compose(
        layout, *recipes_from_entries([{"pfedsim": {"layers": ["head", "dense"], "at": "client"}}, "int8"])
    )
    server = first_server(method, tree, 5)
    ctx = sparing_ctx([0, 3])
    down = outgoing(method, server, ctx)
    up, _ = client(method, first_client(method, tree), down, still, ctx)
    assert not [name for parcel in (down, up) for name in parcel.leaves if name.startswith(("head", "dense"))]
    assert up.notes["similarity"].shape == (2,)


def sparing_ctx(ids):
    return changed(make_ctx(ids, clients=5), first=torch.ones(len(ids), dtype=torch.bool))


def still(lesson, ctx):
    k = len(ctx.ids)
    return Trained(
        {n: x.expand(k, *x.shape[1:]).clone() for n, x in lesson.start.items()}, lesson.memory, {"loss": torch.zeros(k)}
    )


def test_the_cosine_of_a_client_costs_four_bytes():
    clients = sum(record.clients for record in play("pfedsim").table)
    assert play([{"pfedsim": {"at": "client"}}]).up_bytes - play("pfedsim").up_bytes == 4 * clients


def test_the_head_comes_down_in_the_warm_up_and_at_first_contact_only():
    model = build_network("cnn", (1, 8, 8), 10)
    method = compose(layout_of(model), *recipes_from_entries([PUBLISHED]))
    server = first_server(method, tree_of(model), 5)
    sent = {}
    for t in (8, 9):
        for first in (False, True):
            ctx = changed(sparing_ctx([0]), first=torch.tensor([first]))._replace(round=t)
            sent[t, first] = int(nbytes(outgoing(method, server, ctx))[0])
    head = 4 * 10 * (64 + 1)
    assert sent[8, False] == sent[8, True] == sent[9, True]
    assert head - 8 <= sent[8, False] - sent[9, False] <= head + 8


def test_the_study_names_the_layers():
    ours = play("pfedsim", personalization={"shared_layers": ["conv1", "conv2"]})
    assert ours.model_sha256 == play([{"pfedsim": {"shared": ["conv1", "conv2"]}}]).model_sha256
    assert ours.table[0].metrics["shared_param_count"] == 16 * 9 + 16 + 32 * 16 * 9 + 32
    both = play("personal", personalization={"personalized_layers": ["dense", "head"]})
    assert both.up_bytes == ours.up_bytes


@pytest.mark.parametrize(
    ("method", "layers", "error", "words"),
    [
        (
            "fedavg+int8",
            {"personalized_layers": ["head"]},
            ConfigError,
            "nothing in fedavg . int8 keeps layers personal",
        ),
        ([{"pfedsim": {"layers": ["head"]}}], {"shared_layers": ["conv1"]}, ConfigError, "pfedsim.layers and personal"),
        ("pfedsim", {"personalized_layers": ["heat"]}, MethodError, "'heat' matches no layer; did you mean 'head'"),
        ("pfedsim", {"shared_layers": ["conv1"], "personalized_layers": ["conv1"]}, MethodError, "is in both"),
        ("personal", {"personalized_layers": []}, MethodError, "name at least one layer"),
    ],
)
def test_layers_that_cannot_be_meant(method, layers, error, words):
    with pytest.raises(error, match=words):
        play(method, personalization=layers)


def test_an_unknown_key_beside_the_lists():
    with pytest.raises(ConfigError, match=r"unknown key 'personalization.layers'; did you mean"):
        study_from({"personalization": {"layers": ["head"]}})
